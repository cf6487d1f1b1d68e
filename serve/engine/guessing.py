"""The host's side of speculative decoding: guesses of the running requests, how many a step verifies, and
what came of them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..speculation.controller import Controller
from ..speculation.drafter import Drafter
from .request import Request
from .scheduler import Guess, Work


class Taken(NamedTuple):
    """A row of a step: how many tokens it sampled, those that its request took of them (fewer where it ends
    among them), and whether it computed a prompt."""

    work: Work
    sampled: int
    tokens: list[int]
    prompt: bool


class Speculation:
    """Asks a drafter for guesses, and a controller for how many of them are worth a step's time. The engine
    says three things to it: `offers`, `took`, `ended`.

    `k` are the most guesses of a row, `seconds` what a step takes by (rows, guesses) as `step_seconds` has
    them; without them every guess is verified. Nothing here changes a result: it only decides what a step is
    asked to verify.
    """

    def __init__(self, drafter: Drafter, k: int, seconds: Mapping[tuple[int, int], float] | None = None):
        self.drafter, self.k = drafter, k
        self.controller = (
            None if seconds is None else Controller.of_times(sorted({n for _, n in seconds}), seconds)
        )
        self.sizes = sorted({rows for rows, _ in seconds or ()})
        self.following: set[Request] = set()
        # when the last step's results arrived, and whether the next had waited for them
        self.last: tuple[float, bool] | None = None
        self.passes = self.emitted = self.drafted = 0
        self.tried, self.right = [0] * k, [0] * k

    # ------------------------------------------------------------ guesses

    def offers(self, rows: int, idle: bool) -> Guess | None:
        """What guesses for a next step of `rows` rows, once the last step's tokens are known; None for a
        plain step. `idle` says that no step is running."""
        if idle:
            self.last = None
        asked = rows > 0 and (self.controller is None or self.controller.asks(self._size(rows)))
        return self._guesses if asked else None

    def _guesses(self, works: Sequence[Work]) -> list[list[int]]:
        guesses = [self._guess(work) for work in works]
        k = self._chosen([len(g) for g in guesses])
        return [g[:k] for g in guesses]

    def _guess(self, work: Work) -> list[int]:
        """Nothing for a row that feeds what it had generated before a preemption."""
        request = work.request
        if work.start + 1 < len(request.tokens):
            return []
        if request not in self.following:
            self.following.add(request)
            self.drafter.begin(request, request.prompt)
            self.drafter.extend(request, request.outputs)
        return self.drafter.guess(request, min(self.k, request.reach - 2 - work.start))

    def _chosen(self, offered: list[int]) -> int:
        if self.controller is None or not offered:
            return self.k
        return self.controller.choose(self._size(len(offered)), offered)

    def _size(self, rows: int) -> int:
        return next((size for size in self.sizes if size >= rows), self.sizes[-1])

    # ------------------------------------------------------------ what came of them

    def took(self, rows: Sequence[Taken], arrived: float, waited: bool) -> None:
        """The results of a step with these rows arrived at this time; `waited` says that the next step is
        planned after them."""
        for row in rows:
            if row.tokens:
                self._learn(row)
        prompts = any(row.prompt for row in rows)
        self._time(None if prompts else [row.work for row in rows], arrived, waited)

    def ended(self, request: Request) -> None:
        """A request has finished or was aborted."""
        if request in self.following:
            self.following.remove(request)
            self.drafter.end(request)

    def _learn(self, row: Taken) -> None:
        request, guesses = row.work.request, row.work.guesses
        if request in self.following:
            self.drafter.extend(request, row.tokens)
        if not row.prompt:
            self._judge(len(guesses), row.sampled)

    def _judge(self, guesses: int, emitted: int) -> None:
        accepted = emitted - 1
        self.passes += 1
        self.emitted += emitted
        self.drafted += guesses
        for i in range(min(emitted, guesses)):
            self.tried[i] += 1
            self.right[i] += i < accepted
        if guesses and self.controller is not None:
            self.controller.judged(guesses, accepted)

    def _time(self, works: Sequence[Work] | None, now: float, waited: bool) -> None:
        """A step that is planned after the last one's tokens is timed from these to its own; of others, those
        between two that overlapped. None stands for a step that did something else too."""
        before = self.last
        self.last = (now, waited) if works is not None else None
        if works and before is not None and self.controller is not None and (before[1] or not waited):
            k = max(len(work.guesses) for work in works)
            k = next(n for n in self.controller.ks if n >= k) if before[1] else None
            self.controller.timed(self._size(len(works)), k, now - before[0])

    def report(self) -> dict[str, Any]:
        """Guesses verified and accepted, the share accepted of those judged at each place, tokens that a
        row's pass gave."""
        return {
            "drafted": self.drafted,
            "accepted": sum(self.right),
            "acceptance": [r / j for r, j in zip(self.right, self.tried, strict=True) if j],
            "tokens_per_pass": self.emitted / max(self.passes, 1),
        }

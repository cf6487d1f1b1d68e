"""The host's side of speculative decoding: guesses of the running requests, how many a step verifies, and
what came of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..speculation.controller import Controller
from ..speculation.drafter import Drafter
from .request import Request
from .scheduler import Work


class Speculation:
    """Asks a drafter for guesses, and a controller for how many of them are worth a step's time.

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
        self.last: tuple[float, bool] | None = (
            None  # when the last step was taken in, and whether the next had waited for it
        )
        self.passes = self.emitted = self.drafted = 0
        self.tried, self.right = [0] * k, [0] * k

    # ------------------------------------------------------------ guesses

    def wanted(self, rows: int) -> bool:
        """Whether the next step of so many rows may verify guesses, for which the last step's tokens must be
        known."""
        return rows > 0 and (self.controller is None or self.controller.asks(self._size(rows)))

    def guess(self, works: Sequence[Work]) -> list[list[int]]:
        """Guesses for each row of a step; none for one that feeds what it had generated before a
        preemption."""
        guesses = [self._guess(work) for work in works]
        k = self._chosen([len(g) for g in guesses])
        return [g[:k] for g in guesses]

    def _guess(self, work: Work) -> list[int]:
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

    def grew(self, request: Request, tokens: Sequence[int]) -> None:
        """A request has got these tokens."""
        if request in self.following:
            self.drafter.extend(request, tokens)

    def judged(self, guesses: int, emitted: int) -> None:
        """A row's step with so many guesses has given so many tokens, at least one."""
        accepted = emitted - 1
        self.passes, self.emitted, self.drafted = (
            self.passes + 1,
            self.emitted + emitted,
            self.drafted + guesses,
        )
        for i in range(min(emitted, guesses)):
            self.tried[i] += 1
            self.right[i] += i < accepted
        if guesses and self.controller is not None:
            self.controller.judged(guesses, accepted)

    def ended(self, request: Request) -> None:
        if request in self.following:
            self.following.remove(request)
            self.drafter.end(request)

    def committed(self, works: Sequence[Work] | None, now: float = 0.0, waited: bool = False) -> None:
        """The results of a step with these rows came `now`; None where it did something else too, or nothing.

        `waited` says that the next step is planned after them. A step planned so is timed from there to its
        own results; of others those between two that overlapped.
        """
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

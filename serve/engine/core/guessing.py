"""The host's side of speculative decoding: guesses of the running requests, how many a step verifies, and
what came of them."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ....kvcache.pages import ON_DEVICE
from ..speculation.acceptance import UNKNOWN, Offer, form_of
from ..speculation.controller import Controller
from ..speculation.drafter import ON_THE_DEVICE, Drafter
from .plan import Guess, ScheduledTokens
from .request import Request

STEPS_BETWEEN_GLANCES = 16  # plain steps between two looks at what would have been guessed
GLANCED = 2  # requests that are looked at
REMEMBERED = 8  # glances that stand for all requests


class RowResult(NamedTuple):
    """A row of a step: how many tokens it sampled, those that its request took of them (fewer where it ends
    among them), and whether it computed a prompt."""

    work: ScheduledTokens
    sampled: int
    tokens: list[int]
    prompt: bool

    @property
    def has_news(self) -> bool:
        """Whether its request has got further than was known at its dispatch: a row within a prompt has
        not."""
        return bool(self.tokens) or not self.prompt


class Arrival(NamedTuple):
    """When a step's results arrived, by a clock that stops during prefill; whether the next waited for them,
    and whether it computed prompts."""

    at: float
    waited: bool
    prompts: bool


@dataclass
class Followed:
    """A request that the drafter knows: how many of its tokens, the last guess, which followed them, and how
    many tokens in a row were guessed (None before the first was judged)."""

    seen: int
    guess: Sequence[int] = field(default=())
    run: int | None = None

    @property
    def form(self) -> int:
        return UNKNOWN if self.run is None else form_of(self.run)


class Speculation:
    """Asks a drafter for guesses, and a controller for how many of them are worth a step's time. The engine
    says three things to it: `offers`, `took`, `ended`.

    `k` are the most guesses of a row; without a controller every guess is verified. The drafter hears of a
    request's tokens when it is asked for guesses, not of each as it comes. Nothing here changes a result: it
    only decides what a step is asked to verify.
    """

    def __init__(self, drafter: Drafter, k: int, controller: Controller | None = None):
        self.drafter, self.k, self.controller = drafter, k, controller
        self.following: dict[Request, Followed] = {}
        self.last: Arrival | None = None
        self.rested, self.glanced = 0, deque[Offer](maxlen=REMEMBERED)
        self.passes = self.emitted = self.drafted = 0
        self.tried, self.right = [0] * k, [0] * k

    # ------------------------------------------------------------ guesses

    def offers(self, rows: int, idle: bool) -> Guess | None:
        """What guesses for a next step of `rows` rows, once the last step's tokens are known; None for a
        plain step. `idle` says that no step is running."""
        if idle:
            self.last = None
        asked = rows > 0 and (self.controller is None or self.controller.asks(rows))
        return self._guesses if asked else None

    def _guesses(self, works: Sequence[ScheduledTokens]) -> list[Sequence[int]]:
        guesses = [self._guess(work) for work in works]
        if self.controller is None or not works:
            return guesses
        offers = [self._offer(work.request, g) for work, g in zip(works, guesses, strict=True)]
        return [g[:n] for g, n in zip(guesses, self.controller.choose(offers), strict=True)]

    def _guess(self, work: ScheduledTokens) -> Sequence[int]:
        """Nothing for a row that feeds what it had generated before a preemption."""
        request = work.request
        if work.start + 1 < len(request.tokens):
            return ()
        return self._follow(request, min(self.k, request.reach - 2 - work.start))

    def _follow(self, request: Request, k: int) -> Sequence[int]:
        """The drafter hears what the request's tokens are, and guesses k more. The tokens tell how good the
        guess before was."""
        followed = self.following.get(request)
        if followed is None:
            followed = self.following[request] = Followed(len(request.tokens))
            self.drafter.begin(request, request.prompt)
            self.drafter.extend(request, request.outputs)
        else:
            self._catch_up(request, followed)
        followed.guess = self.drafter.guess(request, k)
        if request.constraint is not None:
            followed.guess = request.constraint.ahead(followed.guess, k)
        return followed.guess

    def _catch_up(self, request: Request, followed: Followed) -> None:
        new = request.tokens[followed.seen :]
        self.drafter.extend(request, new)
        followed.seen += len(new)
        guess, followed.guess = followed.guess[: len(new)], ()
        if guess and guess[0] != ON_DEVICE:
            right = same(guess, new)
            if self.controller is not None:
                self.controller.judged(followed.form, len(guess), right)
            followed.run = right + (followed.run or 0) * (right == len(guess))

    def _offer(self, request: Request, guess: Sequence[int]) -> Offer:
        followed = self.following.get(request)
        return Offer(len(guess), UNKNOWN if followed is None else followed.form)

    # ------------------------------------------------------------ what came of them

    def took(self, rows: Sequence[RowResult], arrived: float, waited: bool) -> None:
        """Take in the results of a step with these rows.

        arrived: when they came, seconds without those of prefill. waited: whether the next step is planned
        after them.
        """
        for row in rows:
            if row.tokens:
                self._learn(row)
        decoded = [row for row in rows if not row.prompt]
        self._time(decoded, Arrival(arrived, waited, len(decoded) < len(rows)))
        if self.controller is not None and not waited:
            self._glance(rows)

    def ended(self, request: Request) -> None:
        """A request has finished or was aborted."""
        if (followed := self.following.pop(request, None)) is not None:
            self._catch_up(request, followed)
            self.drafter.end(request)

    def _learn(self, row: RowResult) -> None:
        guesses = row.work.guesses
        if row.prompt:
            return
        self.passes += 1
        self.emitted += row.sampled
        if guesses:
            self._judge(guesses, row.sampled)

    def _judge(self, guesses: Sequence[int], emitted: int) -> None:
        self.drafted += len(guesses)
        for i in range(min(emitted, len(guesses))):
            self.tried[i] += 1
            self.right[i] += i < emitted - 1
        if self.controller is not None and guesses[0] == ON_DEVICE:
            self.controller.judged(UNKNOWN, len(guesses), emitted - 1)

    def _time(self, rows: Sequence[RowResult], now: Arrival) -> None:
        """Time a step that is planned after the last one's tokens from these to its own, and of others those
        between two that overlapped. Host work on prompts is time that the former lose: it is not hidden."""
        before, self.last = self.last, now
        if before is None or not rows or self.controller is None:
            return
        seconds, prompts = now.at - before.at, before.prompts or now.prompts
        if before.waited:
            guesses, tokens = [len(row.work.guesses) for row in rows], sum(row.sampled for row in rows)
            self.controller.verified(guesses, tokens, seconds, prompts)
        elif not (now.waited or prompts):
            self.controller.plainly(len(rows), seconds)

    def _glance(self, rows: Sequence[RowResult]) -> None:
        """While steps are plain, and the next one runs already: guess for a few requests now and then."""
        self.rested += 1
        if self.rested % STEPS_BETWEEN_GLANCES or self.drafter == ON_THE_DEVICE:
            return
        first = self.rested // STEPS_BETWEEN_GLANCES * GLANCED
        for row in [rows[(first + i) % len(rows)] for i in range(min(GLANCED, len(rows)))]:
            if not row.prompt and not row.work.request.finished:
                guess = self._follow(row.work.request, self.k)
                self.glanced.append(self._offer(row.work.request, guess))
        assert self.controller is not None
        self.controller.glance(len(rows), self.glanced)

    def report(self) -> dict[str, Any]:
        """Guesses verified and accepted, the share accepted of those judged at each place, tokens that a
        row's pass gave."""
        return {
            "drafted": self.drafted,
            "accepted": sum(self.right),
            "acceptance": [r / j for r, j in zip(self.right, self.tried, strict=True) if j],
            "tokens_per_pass": self.emitted / max(self.passes, 1),
        }


def same(guess: Sequence[int], tokens: Sequence[int]) -> int:
    """How many of the first guesses are the tokens."""
    return next((i for i, (a, b) in enumerate(zip(guess, tokens, strict=False)) if a != b), len(guess))

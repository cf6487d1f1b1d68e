"""Speculative decoding on the host: draft tokens of running requests, how many of them a step verifies, and
how many were accepted."""

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

STEPS_BETWEEN_GLANCES = 16  # plain steps between two drafts that are only compared
GLANCED = 2  # requests drafted for at a glance
REMEMBERED = 8  # offers that stand for all requests


class RowResult(NamedTuple):
    """Results of one row of a step."""

    work: ScheduledTokens  # tokens that it computed
    sampled: int  # number of tokens that it sampled
    tokens: list[int]  # those that its request took, fewer if it ended among them
    prompt: bool  # it computed a prompt

    @property
    def has_news(self) -> bool:
        """True unless the row ended within a prompt: then its request is where the dispatch left it."""
        return bool(self.tokens) or not self.prompt


class Arrival(NamedTuple):
    """Arrival of a step's results."""

    at: float  # seconds, by a clock that stops during prefill
    waited: bool  # the next step was planned after them
    prompts: bool  # the step computed prompts


@dataclass
class Followed:
    """Drafting state of one request."""

    seen: int  # tokens that the drafter has
    guess: Sequence[int] = field(default=())  # the last draft tokens, proposed behind those
    run: int | None = None  # draft tokens in a row that were right; None before the first was judged

    @property
    def form(self) -> int:
        return UNKNOWN if self.run is None else form_of(self.run)


class Speculation:
    """Takes draft tokens from a drafter and the number to verify from a controller. The engine calls
    `proposer`, `record` and `forget`.

    k: most draft tokens of a row.
    controller: without one, every draft token is verified.

    The drafter gets a request's new tokens when it is asked for draft tokens, not as each of them comes.
    Nothing here changes a result: it only decides what a step verifies.
    """

    def __init__(self, drafter: Drafter, k: int, controller: Controller | None = None):
        self.drafter, self.k, self.controller = drafter, k, controller
        self.following: dict[Request, Followed] = {}
        self.last: Arrival | None = None
        self.rested, self.glanced = 0, deque[Offer](maxlen=REMEMBERED)
        self.passes = self.emitted = self.drafted = 0
        self.tried, self.right = [0] * k, [0] * k

    # ------------------------------------------------------------ guesses

    def proposer(self, rows: int, idle: bool) -> Guess | None:
        """Return what proposes draft tokens for a next step of `rows` rows, called once the last step's
        tokens are known; None for a plain step.

        idle: no step is in flight.
        """
        if idle:
            self.last = None
        asked = rows > 0 and (self.controller is None or self.controller.should_speculate(rows))
        return self._guesses if asked else None

    def _guesses(self, works: Sequence[ScheduledTokens]) -> list[Sequence[int]]:
        guesses = [self._guess(work) for work in works]
        if self.controller is None or not works:
            return guesses
        offers = [self._offer(work.request, g) for work, g in zip(works, guesses, strict=True)]
        return [g[:n] for g, n in zip(guesses, self.controller.choose(offers), strict=True)]

    def _guess(self, work: ScheduledTokens) -> Sequence[int]:
        """Return no draft tokens for a row that replays what was generated before a preemption."""
        request = work.request
        if work.start + 1 < len(request.tokens):
            return ()
        return self._follow(request, min(self.k, request.reach - 2 - work.start))

    def _follow(self, request: Request, k: int) -> Sequence[int]:
        """Pass a request's new tokens to the drafter, and return k draft tokens. The new tokens judge the
        last ones."""
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
                self.controller.record_acceptance(followed.form, len(guess), right)
            followed.run = right + (followed.run or 0) * (right == len(guess))

    def _offer(self, request: Request, guess: Sequence[int]) -> Offer:
        followed = self.following.get(request)
        return Offer(len(guess), UNKNOWN if followed is None else followed.form)

    # ------------------------------------------------------------ what came of them

    def record(self, rows: Sequence[RowResult], arrived: float, waited: bool) -> None:
        """Record the results of a step with these rows.

        arrived: when they came, seconds without those of prefill.
        waited: the next step is planned after them.
        """
        for row in rows:
            if row.tokens:
                self._learn(row)
        decoded = [row for row in rows if not row.prompt]
        self._time(decoded, Arrival(arrived, waited, len(decoded) < len(rows)))
        if self.controller is not None and not waited:
            self._glance(rows)

    def forget(self, request: Request) -> None:
        """Forget a request that has finished or was aborted."""
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
            self.controller.record_acceptance(UNKNOWN, len(guesses), emitted - 1)

    def _time(self, rows: Sequence[RowResult], now: Arrival) -> None:
        """Report the time of a verified step, from the last step's results to its own, or of a plain one
        between two that overlapped. Host work on prompts is part of the former, since nothing hides it."""
        before, self.last = self.last, now
        if before is None or not rows or self.controller is None:
            return
        seconds, prompts = now.at - before.at, before.prompts or now.prompts
        if before.waited:
            guesses, tokens = [len(row.work.guesses) for row in rows], sum(row.sampled for row in rows)
            self.controller.record_verified(guesses, tokens, seconds, prompts)
        elif not (now.waited or prompts):
            self.controller.record_plain(len(rows), seconds)

    def _glance(self, rows: Sequence[RowResult]) -> None:
        """Draft for a few requests now and then while steps are plain, beside the step that runs."""
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
        """Return draft tokens verified and accepted, the share accepted by place, and tokens of a row's
        pass."""
        return {
            "drafted": self.drafted,
            "accepted": sum(self.right),
            "acceptance": [r / j for r, j in zip(self.right, self.tried, strict=True) if j],
            "tokens_per_pass": self.emitted / max(self.passes, 1),
        }


def same(guess: Sequence[int], tokens: Sequence[int]) -> int:
    """Return how many of the first draft tokens are the tokens."""
    return next((i for i, (a, b) in enumerate(zip(guess, tokens, strict=False)) if a != b), len(guess))

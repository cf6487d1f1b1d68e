"""Batching of prefills: how many waiting prompts are admitted now, and how many wait to share a prefill.

Requests end one by one, so slots become free one by one. A prompt that is admitted at once is prefilled
nearly alone, in a shape made for several. If no client waits for its first token, a slot may stay empty for
some steps, as long as the time that wastes is less than what a shared prefill saves.
"""

import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from ...options.checks import round_up
from ...runtime.compiled.shapes import Shape, row_tokens, shape_of_one, smallest
from ...runtime.equal_bits.classes import ShapeClasses
from .request import Request

STEPS = 32  # over which the rate of freed slots is averaged
Seconds = Callable[[Shape], float | None]  # of a shape, None if it has never run


class Outlook(NamedTuple):
    """Inputs of an admission decision."""

    together: Sequence[float]  # `together[n - 1]`, seconds of one prefill of the first n prompts of the queue
    best: Sequence[float]  # for each prompt, its seconds in a full prefill
    free: int  # free slots
    rate: float  # slots that become free in a step
    seat: float  # seconds of a step that one empty slot wastes

    def empty(self, n: int) -> float:
        """Return the seconds wasted until n slots are free."""
        if self.rate <= 0:
            return math.inf
        steps = math.ceil((n - self.free) / self.rate)
        return self.seat * steps * (self.free + self.rate * (steps - 1) / 2)


def choose(look: Outlook) -> int:
    """Return how many of the first prompts are admitted now; 0 is none before more slots are free.

    It compares two ways to compute the same n prompts: some now and the others later, each at its best; or
    all together, once n slots are free. The second has to pay for the slots that stay empty until then.
    """
    before = list(itertools.accumulate(look.best, initial=0.0))
    most = min(look.free, len(look.together))

    def apart(now: int, n: int) -> float:
        return look.together[now - 1] + before[n] - before[now]

    now = min(range(1, most + 1), key=lambda n: (apart(n, most) + (most - n) * look.seat, -n))
    more = range(look.free + 1, len(look.together) + 1)
    return 0 if any(look.together[n - 1] + look.empty(n) < apart(now, n) for n in more) else now


class Costs:
    """Estimated seconds of prefill and decode, from the shapes that have run; others in proportion to their
    areas."""

    def __init__(self, classes: ShapeClasses, seconds: Seconds):
        self.classes, self._seconds = classes, seconds
        self.row = row_tokens(classes.prefill, prompts=2)
        most = max(s.rows for s in classes.prefill if s.tokens >= self.row)
        self._shared = [smallest(classes.prefill, n, self.row) for n in range(1, most + 1)]

    def prefill(self, tokens: Sequence[int]) -> tuple[list[float], list[float]] | None:
        """Return `together` and `best` of prompts with `tokens[i]` tokens to compute; None if prompts cannot
        share a prefill, or if none has run."""
        each = {s: self._of(s, self.classes.prefill) for s in self.classes.prefill}
        shared = [each[s] for s in self._shared]
        if len(shared) == 1 or shared[0] is None:
            return None
        alone = [each[shape_of_one(self.classes.prefill, n)] or 0.0 for n in tokens]
        rows = [-(-n // self.row) for n in tokens]
        full = min((t or 0.0) / n for n, t in enumerate(shared, 1))
        best = [min(one, n * full) for one, n in zip(alone, rows, strict=True)]
        return [*alone[:1], *(rowed(shared, n) for n in list(itertools.accumulate(rows))[1:])], best

    def seat(self, rows: int, steps: int) -> float | None:
        """Return the seconds of one row of a decode of `rows` rows; None if no decode has run."""
        fitting = [s for s in self.classes.decode if s.tokens == steps]
        if not fitting:
            return None
        shape = smallest(fitting, min(rows, max(s.rows for s in fitting)), steps)
        found = self._of(shape, self.classes.decode)
        return None if found is None else found / shape.rows

    def _of(self, shape: Shape, among: Iterable[Shape]) -> float | None:
        own = self._seconds(shape)
        if own is not None:
            return own
        known = [(abs(s.area - shape.area), t / s.area) for s in among if (t := self._seconds(s)) is not None]
        return min(known)[1] * shape.area if known else None


def rowed(shared: Sequence[float | None], rows: int) -> float:
    """Return the seconds of `rows` rows in as many calls as they take; `shared[n - 1]` is the time of a call
    of n rows."""
    full, rest = divmod(rows, len(shared))
    return full * (shared[-1] or 0.0) + ((shared[rest - 1] or 0.0) if rest else 0.0)


class PrefillBatcher:
    """Holds prompts back while that saves time, at most `Request.patience` seconds after their arrival: once
    that has passed for one of them, all are admitted.

    classes: returns the shapes that serve now.
    seconds: typical time of a shape.
    """

    def __init__(
        self,
        classes: Callable[[], ShapeClasses],
        seconds: Seconds,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._classes, self._seconds, self._clock = classes, seconds, clock
        self._costs: Costs | None = None
        self._hurried: list[tuple[float, int, Request]] = []  # by the moment until which they may be held
        self._order = itertools.count()
        self._rate, self._running = 0.0, 0
        self._holding, self._since = False, 0.0
        self.groups, self.prompts, self.steps, self.held = 0, 0, 0, 0.0

    def queued(self, request: Request, waiting: int) -> None:
        """Record a request that has joined the queue, now `waiting` long."""
        if waiting == 1:  # all that were held back before are gone
            self._since = 0.0
        if request.patience < math.inf:
            entry = request.clock.arrival + request.patience, next(self._order), request
            heapq.heappush(self._hurried, entry)
        if len(self._hurried) > 2 * waiting:
            self._hurried = [entry for entry in self._hurried if is_waiting(entry[2])]
            heapq.heapify(self._hurried)

    def limit(self, free: int, decoding: int, steps: int, tokens: Sequence[int]) -> int:
        """Return how many of the first requests are admitted now.

        free: free slots.
        decoding, steps: rows of decode, and the decode steps of a dispatch.
        tokens: tokens to compute of the first prompts, which together fit one step.
        """
        self._forget_seated()
        is_hurried = bool(self._hurried) and self._hurried[0][0] <= self._clock()
        now = free if is_hurried or not decoding else self._choose(free, decoding, steps, tokens)
        self._holding = now == 0
        return now

    def dispatched(self, admitted: int, running: int) -> None:
        """Record a dispatched step, the requests `admitted` for it and those that are `running`."""
        ended = max(0, self._running + admitted - running)
        self._rate += (ended - self._rate) / STEPS
        self._running = running
        self._forget_seated()
        if self._holding:
            self.steps += 1
            self._since = self._since or self._clock()
        elif self._since:
            self.groups, self.prompts = self.groups + 1, self.prompts + admitted
            self.held += self._clock() - self._since
            self._since = 0.0
        self._holding = False

    def report(self) -> dict[str, Any]:
        """Return how often prompts were held back, how many were admitted after it, and for how many steps
        and seconds."""
        return {"groups": self.groups, "prompts": self.prompts, "steps": self.steps, "seconds": self.held}

    def _forget_seated(self) -> None:
        while self._hurried and not is_waiting(self._hurried[0][2]):
            heapq.heappop(self._hurried)

    def _choose(self, free: int, decoding: int, steps: int, tokens: Sequence[int]) -> int:
        costs = self._known()
        prefill, seat = costs.prefill(tokens), costs.seat(decoding, steps)
        if not tokens or prefill is None or seat is None:
            return free
        return choose(Outlook(*prefill, free, self._rate, seat))

    def _known(self) -> Costs:
        if self._costs is None or self._costs.classes is not self._classes():
            self._costs = Costs(self._classes(), self._seconds)
        return self._costs


def fitting(tokens: Iterable[int], budget: int, row: int) -> list[int]:
    """Return the tokens of the first prompts that fit a budget, in which a row that is not full counts as
    full."""
    found = []
    for count in tokens:
        budget -= round_up(count, row)
        if budget < 0:
            break
        found.append(count)
    return found


def is_waiting(request: Request) -> bool:
    return request.slot is None and not request.finished

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
from ...runtime.compiled.shapes import Shape, max_row_tokens, single_prompt_shape, smallest_shape
from ...runtime.equal_bits.classes import ShapeClasses
from .request import Request

RATE_STEPS = 32  # steps over which the rate of freed slots is averaged
ShapeSeconds = Callable[[Shape], float | None]  # returns the seconds of a shape; None if it has never run


class AdmissionInputs(NamedTuple):
    """Inputs of an admission decision."""

    # `shared_seconds[n - 1]`: seconds of one prefill of the first n prompts of the queue.
    shared_seconds: Sequence[float]
    best_seconds: Sequence[float]  # for each prompt, its seconds in a full prefill
    free_slots: int  # free slots
    slots_per_step: float  # slots that become free in a step
    slot_seconds: float  # seconds of a step that one empty slot wastes

    def wasted_seconds(self, n: int) -> float:
        """Return the seconds wasted until n slots are free."""
        if self.slots_per_step <= 0:
            return math.inf
        steps = math.ceil((n - self.free_slots) / self.slots_per_step)
        return self.slot_seconds * steps * (self.free_slots + self.slots_per_step * (steps - 1) / 2)


def choose_admission_count(inputs: AdmissionInputs) -> int:
    """Return how many of the first prompts are admitted now; 0 is none before more slots are free.

    It compares two ways to compute the same n prompts: some now and the others later, each at its best; or
    all together, once n slots are free. The second has to pay for the slots that stay empty until then.
    """
    best_before = list(itertools.accumulate(inputs.best_seconds, initial=0.0))
    max_now = min(inputs.free_slots, len(inputs.shared_seconds))

    def split_seconds(now: int, n: int) -> float:
        return inputs.shared_seconds[now - 1] + best_before[n] - best_before[now]

    now = min(
        range(1, max_now + 1),
        key=lambda n: (split_seconds(n, max_now) + (max_now - n) * inputs.slot_seconds, -n),
    )
    more = range(inputs.free_slots + 1, len(inputs.shared_seconds) + 1)
    return (
        0
        if any(inputs.shared_seconds[n - 1] + inputs.wasted_seconds(n) < split_seconds(now, n) for n in more)
        else now
    )


class CallCosts:
    """Estimated seconds of prefill and decode calls.

    A shape that has not run is estimated from the nearest one that has, in proportion to its tokens.
    """

    def __init__(self, classes: ShapeClasses, seconds: ShapeSeconds):
        self.classes, self._seconds = classes, seconds
        self.row_tokens = max_row_tokens(classes.prefill, prompts=2)
        max_rows = max(s.rows for s in classes.prefill if s.tokens >= self.row_tokens)
        self._shared_shapes = [
            smallest_shape(classes.prefill, n, self.row_tokens) for n in range(1, max_rows + 1)
        ]

    def prefill_seconds(self, tokens: Sequence[int]) -> tuple[list[float], list[float]] | None:
        """Return `AdmissionInputs.shared_seconds` and `AdmissionInputs.best_seconds` of prompts with
        `tokens[i]` tokens to compute.

        Returns None if prompts cannot share a prefill, or if no prefill has run.
        """
        seconds = {s: self._shape_seconds(s, self.classes.prefill) for s in self.classes.prefill}
        shared = [seconds[s] for s in self._shared_shapes]
        if len(shared) == 1 or shared[0] is None:
            return None
        alone = [seconds[single_prompt_shape(self.classes.prefill, n)] or 0.0 for n in tokens]
        rows = [-(-n // self.row_tokens) for n in tokens]
        row_seconds = min((t or 0.0) / n for n, t in enumerate(shared, 1))
        best = [min(alone_seconds, n * row_seconds) for alone_seconds, n in zip(alone, rows, strict=True)]
        return [
            *alone[:1],
            *(sum_call_seconds(shared, n) for n in list(itertools.accumulate(rows))[1:]),
        ], best

    def decode_row_seconds(self, rows: int, steps: int) -> float | None:
        """Return the seconds of one row of a decode of `rows` rows; None if no decode has run."""
        decode_shapes = [s for s in self.classes.decode if s.tokens == steps]
        if not decode_shapes:
            return None
        shape = smallest_shape(decode_shapes, min(rows, max(s.rows for s in decode_shapes)), steps)
        seconds = self._shape_seconds(shape, self.classes.decode)
        return None if seconds is None else seconds / shape.rows

    def _shape_seconds(self, shape: Shape, shapes: Iterable[Shape]) -> float | None:
        measured = self._seconds(shape)
        if measured is not None:
            return measured
        known = [
            (abs(s.area - shape.area), t / s.area) for s in shapes if (t := self._seconds(s)) is not None
        ]
        return min(known)[1] * shape.area if known else None


def sum_call_seconds(call_seconds: Sequence[float | None], rows: int) -> float:
    """Return the seconds of `rows` rows, in calls of at most `len(call_seconds)` rows.

    `call_seconds[n - 1]` is the time of a call of n rows.
    """
    full, rest = divmod(rows, len(call_seconds))
    return full * (call_seconds[-1] or 0.0) + ((call_seconds[rest - 1] or 0.0) if rest else 0.0)


class PrefillDelayer:
    """Holds prompts back while a shared prefill saves time.

    A prompt is held at most `Request.max_prefill_delay` seconds after its arrival. Once that time has passed
    for one prompt, all are admitted.

    classes: returns the shapes that serve now.
    seconds: typical time of a shape.
    """

    def __init__(
        self,
        classes: Callable[[], ShapeClasses],
        seconds: ShapeSeconds,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._classes, self._seconds, self._clock = classes, seconds, clock
        self._costs: CallCosts | None = None
        self._deadlines: list[tuple[float, int, Request]] = []  # by the time until which each may be held
        self._order = itertools.count()
        self._slots_per_step, self._running = 0.0, 0
        self._is_holding, self._held_since = False, 0.0
        self.groups, self.prompts, self.steps, self.held_seconds = 0, 0, 0, 0.0

    def on_queued(self, request: Request, num_waiting: int) -> None:
        """Record a request that has joined the queue, now `num_waiting` long."""
        if num_waiting == 1:  # all that were held back before are gone
            self._held_since = 0.0
        if request.max_prefill_delay < math.inf:
            entry = request.times.arrival + request.max_prefill_delay, next(self._order), request
            heapq.heappush(self._deadlines, entry)
        if len(self._deadlines) > 2 * num_waiting:
            self._deadlines = [entry for entry in self._deadlines if is_waiting(entry[2])]
            heapq.heapify(self._deadlines)

    def admission_limit(self, free_slots: int, decode_rows: int, steps: int, tokens: Sequence[int]) -> int:
        """Return how many of the first requests are admitted now.

        decode_rows, steps: rows of decode, and the decode steps of a dispatch.
        tokens: tokens to compute of the first prompts, which together fit one step.
        """
        self._drop_admitted()
        is_overdue = bool(self._deadlines) and self._deadlines[0][0] <= self._clock()
        limit = (
            free_slots
            if is_overdue or not decode_rows
            else self._choose_count(free_slots, decode_rows, steps, tokens)
        )
        self._is_holding = limit == 0
        return limit

    def on_dispatch(self, num_admitted: int, num_running: int) -> None:
        """Record a dispatched step.

        num_admitted: requests admitted in it.
        num_running: requests that run after it.
        """
        ended = max(0, self._running + num_admitted - num_running)
        self._slots_per_step += (ended - self._slots_per_step) / RATE_STEPS
        self._running = num_running
        self._drop_admitted()
        if self._is_holding:
            self.steps += 1
            self._held_since = self._held_since or self._clock()
        elif self._held_since:
            self.groups, self.prompts = self.groups + 1, self.prompts + num_admitted
            self.held_seconds += self._clock() - self._held_since
            self._held_since = 0.0
        self._is_holding = False

    def report(self) -> dict[str, Any]:
        """Return how often prompts were held back, how many were admitted after it, and for how many steps
        and seconds."""
        return {
            "groups": self.groups,
            "prompts": self.prompts,
            "steps": self.steps,
            "seconds": self.held_seconds,
        }

    def _drop_admitted(self) -> None:
        while self._deadlines and not is_waiting(self._deadlines[0][2]):
            heapq.heappop(self._deadlines)

    def _choose_count(self, free_slots: int, decode_rows: int, steps: int, tokens: Sequence[int]) -> int:
        costs = self._current_costs()
        prefill_seconds, slot_seconds = (
            costs.prefill_seconds(tokens),
            costs.decode_row_seconds(decode_rows, steps),
        )
        if not tokens or prefill_seconds is None or slot_seconds is None:
            return free_slots
        return choose_admission_count(
            AdmissionInputs(*prefill_seconds, free_slots, self._slots_per_step, slot_seconds)
        )

    def _current_costs(self) -> CallCosts:
        if self._costs is None or self._costs.classes is not self._classes():
            self._costs = CallCosts(self._classes(), self._seconds)
        return self._costs


def counts_within_budget(tokens: Iterable[int], budget: int, tokens_per_row: int) -> list[int]:
    """Return the token counts of the first prompts that fit a budget of tokens. A row that is not full counts
    as full."""
    counts = []
    for count in tokens:
        budget -= round_up(count, tokens_per_row)
        if budget < 0:
            break
        counts.append(count)
    return counts


def is_waiting(request: Request) -> bool:
    return request.slot is None and not request.is_finished

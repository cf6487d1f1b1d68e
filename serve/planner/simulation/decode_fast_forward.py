"""Decode rows of the simulated engine, computed together. A step gives each row a token. A row is examined
only when it joins, takes a page, or ends. The cost of a step grows with what happens in it, not with its
rows."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

from ....kvcache.sharded_tables import shard_number
from ....model.recurrent.kinds import STATE_WINDOW
from ...engine.core.engine import Engine
from ...engine.core.request import Request
from ...engine.core.results import DispatchedCall, await_and_append_results
from ...engine.core.scheduler_output import ScheduledTokens, SchedulerOutput
from ...engine.core.step_calls import rows_by_number, smallest_holding_shape, split_by_shard
from ...runtime.compiled.shapes import Shape
from .device import SAMPLED_TOKEN, SimulatedExecutor, SimulatedResult
from .step_times import StepCall

MIN_STEPS = 4  # steps that must have pages
ONE_TOKEN = ScheduledTokens(cast(Any, None), 0, 1)


@dataclass(eq=False)
class DecodeRow:
    """A request that decodes.

    first_step: step that computes its first token here.
    first_position: position of this token.
    num_appended: number of these tokens that its request has.
    """

    request: Request
    first_step: int
    first_position: int
    num_appended: int = 0

    @property
    def last_step(self) -> int:
        """Return the step that computes its last token."""
        return self.first_step + self.request.slot_end - 2 - self.first_position

    def position_at(self, step: int) -> int:
        """Return the position that a step computes."""
        return self.first_position + step - self.first_step

    def append_tokens(self, step: int) -> None:
        """Append the tokens of all steps before `step` to the request."""
        count = step - self.first_step
        self.request.tokens += [SAMPLED_TOKEN] * (count - self.num_appended)
        self.num_appended = count


class InFlightDecode(NamedTuple):
    """A step in flight.

    prefill_calls: calls that prefill.
    num_rows: number of rows that decode.
    shape: of their call.
    arrival: moment when their tokens arrive.
    """

    prefill_calls: Sequence[DispatchedCall]
    num_rows: int = 0
    shape: Shape | None = None
    arrival: float = 0.0


@dataclass(eq=False)
class DecodeFastForward:
    """Steps of an engine that treat all rows of decode as one, as its scheduler plans them. The engine can go
    on alone after `return_to_engine`. The engine's distributions of step times do not have these steps.

    step_number: of the step in flight.
    rows: decode rows of this step, by slot.
    """

    engine: Engine
    executor: SimulatedExecutor
    step_number: int = 0
    rows: dict[int, DecodeRow] = field(default_factory=dict)
    in_flight_decode: InFlightDecode | None = None

    def __post_init__(self):
        self._cached, self._shard_rows = 0, [0] * self.engine.sizes.shards  # tokens; rows of each shard
        # Rows by the step that needs another page.
        self._growing: dict[int, list[DecodeRow]] = defaultdict(list)
        self._ends: dict[int, list[DecodeRow]] = defaultdict(list)  # rows by the step that ends them
        self._joining: list[DecodeRow] = []
        self._last_arrival = 0.0  # moment of the last tokens
        self._shapes: dict[tuple[int, ...], Shape | None] = {}

    @cached_property
    def _is_possible(self) -> bool:
        """Tell if steps of this engine decode one token of every row, unless its scheduler plans several."""
        limits, windows = self.engine.scheduler.config, self.engine.tables.windows
        return (
            self.engine.speculation is None
            and limits.groups == self.executor.stages.count == 1
            and self.engine.scheduler.longrope_boundary is None
            and STATE_WINDOW not in windows
        )

    def step(self) -> bool:
        """Take a step. Return False if the engine must take it."""
        if self.in_flight_decode is None and not self._take_over():
            return False
        if not self._can_step():
            self.return_to_engine()
            return False
        with self.engine.stats.time_step():
            self._run_step()
        return True

    # ------------------------------------------------------------ taken over, and given back

    def _take_over(self) -> bool:
        """Take over the step in flight in the engine, if its rows can decode together."""
        if (
            not self._is_possible
            or self.engine.scheduler.decode_steps > 1
            or len(self.engine.in_flight_steps) != 1
        ):
            return False
        flight = self.engine.in_flight_steps.pop_oldest()
        calls = [ran for ran in flight if ran.shape.phase == "decode"]
        scheduled_rows = [work for ran in calls for work in ran.rows.values()]
        decoding = {id(work.request) for work in scheduled_rows}
        ready_requests = [r for r in self._ready_requests() if id(r) not in decoding]
        known = all(
            w.start + 1 == w.request.num_computed_tokens == len(w.request.tokens) for w in scheduled_rows
        )
        if len(calls) > 1 or not known or not self._has_pages(len(scheduled_rows) + len(ready_requests)):
            self.engine.in_flight_steps.add(flight)
            return False
        self.step_number += 1
        for work in scheduled_rows:
            self._add_row(DecodeRow(work.request, self.step_number, work.start))
        self._queue_joining_rows(ready_requests)
        read = [ran for ran in flight if ran.shape.phase != "decode"]
        self.in_flight_decode = InFlightDecode(read)
        if calls:
            self.in_flight_decode = InFlightDecode(
                read, len(scheduled_rows), calls[0].shape, cast(SimulatedResult, calls[0].output).arrival
            )
        return True

    def _ready_requests(self) -> Iterable[Request]:
        """Return the requests whose prompts are in flight or computed."""
        scheduler = self.engine.scheduler
        return (r for slot, r in scheduler.running.items() if slot not in scheduler.prefilling)

    def _has_pages(self, rows: int) -> bool:
        """Tell if `rows` rows have pages for some steps."""
        tables = self.engine.tables
        return all(
            part.full_attention_pool is None
            or part.full_attention_pool.num_free * part.page_size >= MIN_STEPS * (rows + part.page_size)
            for part in tables.shards
        )

    def return_to_engine(self) -> None:
        """Return the step in flight to the engine, and all tokens to the requests."""
        assert self.in_flight_decode is not None
        read, _, shape, at = self.in_flight_decode
        scheduled_rows = [
            self._sync_row(row) for row in sorted(self.rows.values(), key=lambda row: row.request.queue_key)
        ]
        flight = list(read)
        if shape is not None:
            rows = rows_by_number(shape, split_by_shard(scheduled_rows, self.engine.sizes))
            flight.append(DispatchedCall(shape, rows, cast(Any, self.executor.make_result(shape, rows, at))))
        self.engine.in_flight_steps.add(flight)
        for part in (self.rows, self._growing, self._ends, self._joining):
            part.clear()
        self._cached, self._shard_rows, self.in_flight_decode = 0, [0] * len(self._shard_rows), None

    def _sync_row(self, row: DecodeRow) -> ScheduledTokens:
        row.append_tokens(self.step_number)
        row.request.num_computed_tokens = row.position_at(self.step_number) + 1
        if row.num_appended:
            row.request.times.last_token = self._last_arrival
        return ScheduledTokens(row.request, row.position_at(self.step_number), 1)

    # ------------------------------------------------------------ a step

    def _can_step(self) -> bool:
        """Tell if joining rows have their last known token next. Every row must have a page for the next step
        of one token each."""
        tables, number = self.engine.tables, self.step_number + 1
        if self.engine.scheduler.decode_steps > 1 or any(
            len(row.request.tokens) > row.first_position + 1 for row in self._joining
        ):
            return False
        parts = tables.shards
        wanted = [0] * len(parts)
        for row in (*self._growing[number], *self._joining):
            pages = row.request.pages
            wanted[shard_number(pages)] += tables.max_new_pages(pages, row.position_at(number) + 1)
        return all(
            part.full_attention_pool is None or n <= part.full_attention_pool.num_free
            for part, n in zip(parts, wanted, strict=True)
        )

    def _run_step(self) -> None:
        self.step_number += 1
        engine, scheduler, previous = self.engine, self.engine.scheduler, self.in_flight_decode
        max_admitted = scheduler.admission_limit()
        ended_rows, growing_rows = (
            self._ends.pop(self.step_number, []),
            self._growing.pop(self.step_number, []),
        )
        self._replace_ended_rows(ended_rows)
        for row in growing_rows:
            self._grow_row(row)
        admitted_requests = scheduler.admit(max_admitted) if max_admitted else []
        plan = SchedulerOutput(
            admitted_requests, list(scheduler.schedule_prefill()) if scheduler.prefilling else []
        )
        self.in_flight_decode = self._dispatch_decode(
            engine.dispatch(plan) if plan or plan.admitted else self._record_plan(plan)
        )
        if previous is not None:
            self._apply_results(previous, growing_rows, ended_rows)
        prefilled_requests = (*plan.admitted, *(work.request for work in plan.prefill))
        self._queue_joining_rows(
            r for r in prefilled_requests if r.slot is not None and r.slot not in scheduler.prefilling
        )

    def _replace_ended_rows(self, ended_rows: Iterable[DecodeRow]) -> None:
        """Remove rows whose last token is in flight, and add joining rows."""
        self._cached += len(self.rows)
        for row in ended_rows:
            assert row.request.slot is not None
            del self.rows[row.request.slot]
            self._cached -= row.position_at(self.step_number)
            self._shard_rows[shard_number(row.request.pages)] -= 1
        for row in self._joining:
            self._add_row(row)
        self._joining.clear()

    def _queue_joining_rows(self, requests: Iterable[Request]) -> None:
        """Let requests decode together from the next step on."""
        for r in dict.fromkeys(requests):
            if r.num_computed_tokens < r.slot_end - 1:
                self._joining.append(DecodeRow(r, self.step_number + 1, r.num_computed_tokens))

    def _add_row(self, row: DecodeRow) -> None:
        assert row.request.slot is not None
        self.rows[row.request.slot] = row
        self._cached += row.first_position
        self._shard_rows[shard_number(row.request.pages)] += 1
        self._ends[row.last_step + 1].append(row)
        self._grow_row(row)

    def _grow_row(self, row: DecodeRow) -> None:
        """Take the pages of the computed position, and find the next step that needs others."""
        at, size = row.position_at(self.step_number), self.engine.tables.page_size
        self.engine.tables.grow(row.request.pages, at + 1)
        self.engine.tables.advance_windows(row.request.pages, at, at + 1)
        following = self.step_number + 1 + min((edge - at - 1) % size for edge in self._growth_offsets)
        if following <= row.last_step:
            self._growing[following].append(row)

    @cached_property
    def _growth_offsets(self) -> set[int]:
        """Return the positions in a page at which a row takes a page, or leaves one behind a window."""
        size, windows = self.engine.tables.page_size, self.engine.tables.windows
        return {0} | {(window - 1) % size for window in windows if window}

    def _record_plan(self, scheduler_output: SchedulerOutput) -> list[DispatchedCall]:
        """Record a plan without prefill."""
        self.engine.scheduler.on_dispatch(scheduler_output)
        self.engine.stats.record_occupancy(self.engine.tables)
        return []

    def _dispatch_decode(self, prefill_calls: Sequence[DispatchedCall]) -> InFlightDecode | None:
        if not self.rows:
            return InFlightDecode(prefill_calls) if prefill_calls else None
        rows, shape = len(self.rows), self._choose_shape()
        self.engine.stats.on_dispatch(shape, rows, self._cached, len(self._shard_rows))
        return InFlightDecode(
            prefill_calls, rows, shape, self.executor.dispatch(StepCall(shape, rows, rows, self._cached))
        )

    def _choose_shape(self) -> Shape:
        loads = tuple(self._shard_rows)
        if loads not in self._shapes:
            self._shapes[loads] = smallest_holding_shape(
                self.engine.classes.decode, [[ONE_TOKEN] * n for n in loads]
            )
        shape = self._shapes[loads]
        assert shape is not None, f"no shape holds {loads} rows"
        return shape

    def _apply_results(
        self,
        in_flight_decode: InFlightDecode,
        growing_rows: Iterable[DecodeRow],
        ended_rows: Iterable[DecodeRow],
    ) -> None:
        """Apply a step's results. Name the pages that rows have filled, and end the rows that had their last
        token."""
        read = list(in_flight_decode.prefill_calls)
        results = await_and_append_results(read, self.engine.stats) if read else []
        if in_flight_decode.shape is not None:
            self.executor.clock.wait_until(in_flight_decode.arrival)
            self.engine.stats.on_result()
            self.engine.stats.generated_tokens += in_flight_decode.num_rows
            self._last_arrival = self.executor.clock()
        for result in results:
            if result.scheduled.request.slot is not None and result.has_changed_request:
                self.engine.on_tokens_computed(result.scheduled)
        for row in growing_rows:
            row.append_tokens(self.step_number)
            self.engine.scheduler.cache_pages(
                row.request, row.position_at(self.step_number) - 1, row.position_at(self.step_number)
            )
        for row in sorted(ended_rows, key=lambda row: row.request.queue_key):
            self._end_row(row)

    def _end_row(self, row: DecodeRow) -> None:
        row.append_tokens(self.step_number - 1)
        row.request.num_computed_tokens = row.position_at(self.step_number)
        row.request.append(SAMPLED_TOKEN)
        self.engine.on_tokens_computed(ScheduledTokens(row.request, row.request.num_computed_tokens - 1, 1))

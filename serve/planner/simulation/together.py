"""Requests that only decode, taken together: a step gives each of them a token, so one of them is looked at
only where it joins, takes a page, or ends. What a step costs grows with what happens in it, not with its
rows."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, cast

from ....kvcache.sharded_tables import shard_of
from ....model.recurrent.kinds import STATE
from ...engine.core.engine import Engine
from ...engine.core.plan import ScheduledTokens, SchedulerOutput
from ...engine.core.request import Request
from ...engine.core.results import DispatchedStep, take_all
from ...engine.core.rows import by_shards, holder, numbered
from ...runtime.compiled.shapes import Shape
from .device import TOKEN, SimulatedPrograms, SimulatedResult
from .times import StepCall

FEWEST = 4  # steps for which there must be pages
ONE = ScheduledTokens(cast(Any, None), 0, 1)


@dataclass(eq=False)
class DecodeRow:
    """A request that decodes: the step that computes its first token here and that token's position, and the
    step that computes its last; `given` of the tokens its request has."""

    request: Request
    since: int
    start: int
    given: int = 0

    @property
    def last(self) -> int:
        return self.since + self.request.reach - 2 - self.start

    def at(self, step: int) -> int:
        """The position that a step computes."""
        return self.start + step - self.since

    def give(self, step: int) -> None:
        """Let its request have the tokens of all steps before one."""
        count = step - self.since
        self.request.tokens += [TOKEN] * (count - self.given)
        self.given = count


class DecodeFlight(NamedTuple):
    """A step on its way: the calls that read prompts, and of all rows that decode their number, the shape,
    and when their tokens arrive."""

    read: Sequence[DispatchedStep]
    rows: int = 0
    shape: Shape | None = None
    at: float = 0.0


@dataclass(eq=False)
class DecodeFastForward:
    """Steps of an engine in which all rows that decode are taken as one, as its scheduler plans them. The
    engine goes on by itself after `give_back`. The meter's distributions leave these steps out."""

    engine: Engine
    programs: SimulatedPrograms
    number: int = 0  # of the step in flight
    rows: dict[int, DecodeRow] = field(default_factory=dict)  # of that step, by their seats
    flight: DecodeFlight | None = None

    def __post_init__(self):
        self._cached, self._loads = 0, [0] * self.engine.sizes.shards  # tokens; rows of each shard
        self._turns: dict[int, list[DecodeRow]] = defaultdict(
            list
        )  # rows by the step that needs another page
        self._ends: dict[int, list[DecodeRow]] = defaultdict(list)  # and by the step in which they end
        self._joining: list[DecodeRow] = []
        self._arrived = 0.0  # the last tokens
        self._shapes: dict[tuple[int, ...], Shape | None] = {}

    @cached_property
    def _may(self) -> bool:
        """Steps of this engine decode one token of every row, unless its scheduler plans several."""
        limits, windows = self.engine.scheduler.limits, self.engine.tables.windows
        return (
            self.engine.speculation is None
            and limits.groups == self.programs.stages.count == 1
            and self.engine.scheduler.boundary is None
            and STATE not in windows
        )

    def step(self) -> bool:
        """Take a step; False where it is the engine's own to take."""
        if self.flight is None and not self._gather():
            return False
        if not self._fits():
            self.give_back()
            return False
        with self.engine.meter.working():
            self._advance()
        return True

    # ------------------------------------------------------------ taken over, and given back

    def _gather(self) -> bool:
        """Take over the step that is on its way in the engine, if its rows may go on together."""
        if not self._may or self.engine.scheduler.steps > 1 or len(self.engine.flights) != 1:
            return False
        flight = self.engine.flights.oldest()
        calls = [ran for ran in flight if ran.shape.phase == "decode"]
        works = [work for ran in calls for work in ran.rows.values()]
        own = {id(work.request) for work in works}
        ready = [r for r in self._ready() if id(r) not in own]
        known = all(w.start + 1 == w.request.computed == len(w.request.tokens) for w in works)
        if len(calls) > 1 or not known or not self._have_pages(len(works) + len(ready)):
            self.engine.flights.add(flight)
            return False
        self.number += 1
        for work in works:
            self._enter(DecodeRow(work.request, self.number, work.start))
        self._join(ready)
        read = [ran for ran in flight if ran.shape.phase != "decode"]
        self.flight = DecodeFlight(read)
        if calls:
            self.flight = DecodeFlight(
                read, len(works), calls[0].shape, cast(SimulatedResult, calls[0].output).at
            )
        return True

    def _ready(self) -> Iterable[Request]:
        """Requests whose prompts are on their way or computed."""
        scheduler = self.engine.scheduler
        return (r for slot, r in scheduler.running.items() if slot not in scheduler.prefilling)

    def _have_pages(self, rows: int) -> bool:
        """Tell if `rows` rows have pages for some steps."""
        tables = self.engine.tables
        return all(
            part.full is None or part.full.free * part.page_size >= FEWEST * (rows + part.page_size)
            for part in tables.shards
        )

    def give_back(self) -> None:
        """Let the engine have the step in flight, and its requests all that they have got."""
        assert self.flight is not None
        read, _, shape, at = self.flight
        works = [self._synced(row) for row in sorted(self.rows.values(), key=lambda row: row.request.rank)]
        flight = list(read)
        if shape is not None:
            rows = numbered(shape, by_shards(works, self.engine.sizes))
            flight.append(DispatchedStep(shape, rows, cast(Any, self.programs.coming(shape, rows, at))))
        self.engine.flights.add(flight)
        for part in (self.rows, self._turns, self._ends, self._joining):
            part.clear()
        self._cached, self._loads, self.flight = 0, [0] * len(self._loads), None

    def _synced(self, row: DecodeRow) -> ScheduledTokens:
        row.give(self.number)
        row.request.computed = row.at(self.number) + 1
        if row.given:
            row.request.clock.last_token = self._arrived
        return ScheduledTokens(row.request, row.at(self.number), 1)

    # ------------------------------------------------------------ a step

    def _fits(self) -> bool:
        """Tell if joining rows have their last token next, and every row has a page for the next step, which
        is one of each."""
        tables, number = self.engine.tables, self.number + 1
        if self.engine.scheduler.steps > 1 or any(
            len(row.request.tokens) > row.start + 1 for row in self._joining
        ):
            return False
        parts = tables.shards
        wanted = [0] * len(parts)
        for row in (*self._turns[number], *self._joining):
            pages = row.request.pages
            wanted[shard_of(pages)] += tables.growth(pages, row.at(number) + 1)
        return all(part.full is None or n <= part.full.free for part, n in zip(parts, wanted, strict=True))

    def _advance(self) -> None:
        self.number += 1
        engine, scheduler, before = self.engine, self.engine.scheduler, self.flight
        seats = scheduler.admission_limit()
        ended, turned = self._ends.pop(self.number, []), self._turns.pop(self.number, [])
        self._move(ended)
        for row in turned:
            self._turn(row)
        seated = scheduler.admit(seats) if seats else []
        plan = SchedulerOutput(seated, list(scheduler.chunks()) if scheduler.prefilling else [])
        self.flight = self._dispatch(engine.dispatch(plan) if plan or plan.admitted else self._noted(plan))
        if before is not None:
            self._commit(before, turned, ended)
        seen = (*plan.admitted, *(work.request for work in plan.prefill))
        self._join(r for r in seen if r.slot is not None and r.slot not in scheduler.prefilling)

    def _move(self, ended: Iterable[DecodeRow]) -> None:
        """Rows leave whose last token is on its way, others join."""
        self._cached += len(self.rows)
        for row in ended:
            assert row.request.slot is not None
            del self.rows[row.request.slot]
            self._cached -= row.at(self.number)
            self._loads[shard_of(row.request.pages)] -= 1
        for row in self._joining:
            self._enter(row)
        self._joining.clear()

    def _join(self, requests: Iterable[Request]) -> None:
        """From the next step on."""
        for r in dict.fromkeys(requests):
            if r.computed < r.reach - 1:
                self._joining.append(DecodeRow(r, self.number + 1, r.computed))

    def _enter(self, row: DecodeRow) -> None:
        assert row.request.slot is not None
        self.rows[row.request.slot] = row
        self._cached += row.start
        self._loads[shard_of(row.request.pages)] += 1
        self._ends[row.last + 1].append(row)
        self._turn(row)

    def _turn(self, row: DecodeRow) -> None:
        """Take the pages of the position that is computed, and find the next step that needs others."""
        at, size = row.at(self.number), self.engine.tables.page_size
        self.engine.tables.grow(row.request.pages, at + 1)
        self.engine.tables.advance(row.request.pages, at, at + 1)
        following = self.number + 1 + min((edge - at - 1) % size for edge in self._edges)
        if following <= row.last:
            self._turns[following].append(row)

    @cached_property
    def _edges(self) -> set[int]:
        """Positions in a page at which a row takes one, or leaves one behind a window."""
        size, windows = self.engine.tables.page_size, self.engine.tables.windows
        return {0} | {(window - 1) % size for window in windows if window}

    def _noted(self, plan: SchedulerOutput) -> list[DispatchedStep]:
        """Record a plan without prefill."""
        self.engine.scheduler.dispatched(plan)
        self.engine.meter.planned(self.engine.tables)
        return []

    def _dispatch(self, read: Sequence[DispatchedStep]) -> DecodeFlight | None:
        if not self.rows:
            return DecodeFlight(read) if read else None
        rows, shape = len(self.rows), self._shape()
        self.engine.meter.ran(shape, rows, self._cached, len(self._loads))
        return DecodeFlight(
            read, rows, shape, self.programs.dispatch(StepCall(shape, rows, rows, self._cached))
        )

    def _shape(self) -> Shape:
        loads = tuple(self._loads)
        if loads not in self._shapes:
            self._shapes[loads] = holder(self.engine.classes.decode, [[ONE] * n for n in loads])
        found = self._shapes[loads]
        assert found is not None, f"no shape holds {loads} rows"
        return found

    def _commit(self, flight: DecodeFlight, turned: Iterable[DecodeRow], ended: Iterable[DecodeRow]) -> None:
        """Take in what a step has brought: pages that rows have filled are named, and those that had their
        last token end."""
        read = list(flight.read)
        taken = take_all(read, self.engine.meter) if read else []
        if flight.shape is not None:
            self.programs.clock.wait_until(flight.at)
            self.engine.meter.took()
            self.engine.meter.generated_tokens += flight.rows
            self._arrived = self.programs.clock()
        for own in taken:
            if own.work.request.slot is not None and own.has_news:
                self.engine.conclude(own.work)
        for row in turned:
            row.give(self.number)
            self.engine.scheduler.name_pages(row.request, row.at(self.number) - 1, row.at(self.number))
        for row in sorted(ended, key=lambda row: row.request.rank):
            self._end(row)

    def _end(self, row: DecodeRow) -> None:
        row.give(self.number - 1)
        row.request.computed = row.at(self.number)
        row.request.append(TOKEN)
        self.engine.conclude(ScheduledTokens(row.request, row.request.computed - 1, 1))

"""Steps of decode that nothing interrupts, taken in one go: what the engine would do in them one by one,
without asking the scheduler for the same rows again and again."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

from ...kvcache.dealing import DealtTables, shard_of
from ...kvcache.tables import PageTables
from ...model.recurrent.kinds import STATE
from ..engine.engine import Engine
from ..engine.plan import Work
from ..engine.request import Request
from ..engine.results import Ran
from .device import TOKEN, Coming, SimulatedPrograms
from .times import Call

FEWEST = 2  # steps that are worth a leap


def leap(
    engine: Engine, programs: SimulatedPrograms, until: float, host: Callable[[int], float] = lambda rows: 0.0
) -> int:
    """Take steps until a moment, or until a request would end, as long as they only decode one token of all
    running requests; gives their number. `host` says the host's seconds for a step of some rows.

    The meter's distributions do not hear of them.
    """
    if not may_leap(engine):
        return 0
    flight = engine.flights.oldest()
    steps = most_steps(engine, flight)
    taken = 0
    if steps >= FEWEST:
        taken, ran = take(engine, programs, flight[0], steps, until, host(len(flight[0].rows)))
        flight = [ran]
    engine.flights.add(flight)
    return taken


def may_leap(engine: Engine) -> bool:
    """Whether one step is on its way, and the next would seat nobody and read no prompt."""
    scheduler, limits = engine.scheduler, engine.scheduler.limits
    return (
        len(engine.flights) == 1
        and engine.speculation is None
        and limits.groups == limits.decode_steps == 1
        and not scheduler.reading
        and not (scheduler.waiting and scheduler.free_slots)
        and STATE not in scheduler.tables.windows
    )


def most_steps(engine: Engine, flight: Sequence[Ran]) -> int:
    """How many steps alike may follow one that is on its way: while nobody ends or lacks a page."""
    works, running = flight[0].rows.values(), len(engine.scheduler.running)
    if len(flight) > 1 or flight[0].shape.phase != "decode" or not running or running != len(works):
        return 0
    if not all(w.start + 1 == w.request.computed == len(w.request.tokens) for w in works):
        return 0
    requests, tables = [w.request for w in works], engine.scheduler.tables
    if any(r.slot is None for r in requests):
        return 0
    steps = min(r.reach - 1 - r.computed for r in requests)
    if any(tables.windows):
        steps = min(steps, tables.page_size)
    while steps and not has_pages(tables, requests, steps):
        steps //= 2
    return steps


def has_pages(tables: PageTables, requests: Sequence[Request], steps: int) -> bool:
    """Whether all of them can grow by so many tokens."""
    own = tables.shards if isinstance(tables, DealtTables) else [tables]
    wanted = [0] * len(own)
    for r in requests:
        wanted[shard_of(r.pages)] += tables.growth(r.pages, r.computed + steps)
    return all(part.full is None or n <= part.full.free for part, n in zip(own, wanted, strict=True))


def take(
    engine: Engine, programs: SimulatedPrograms, ran: Ran, most: int, until: float, host: float
) -> tuple[int, Ran]:
    """Steps after one that is on its way, at most so many; their number, and the last, which is on its
    way."""
    clock, meter, rows = programs.clock, engine.meter, len(ran.rows)
    cached, seats = sum(w.start for w in ran.rows.values()), [w.request.slot or 0 for w in ran.rows.values()]
    coming = cast(Coming, ran.output)
    begin, due, steps, last = clock(), coming.at, 0, 0.0
    while steps < most and clock() < until:
        cached, steps = cached + rows, steps + 1
        meter.ran(ran.shape, rows, cached, engine.sizes.shards)
        arrives = programs.dispatch(Call(ran.shape, rows, rows, cached), seats)
        if engine.scheduler.gathering is not None:
            engine.scheduler.gathering.stepped(0, rows)
        clock.wait_until(due)
        meter.took()
        due, last = arrives, clock()
        clock.spend(host)
    meter.seconds += clock() - begin - steps * host
    meter.generated_tokens += steps * rows
    works = {row: advanced(engine, work, steps, last) for row, work in ran.rows.items()}
    meter.planned(engine.tables)
    return steps, ran._replace(rows=works, output=cast(Any, replace(coming, at=due)))


def advanced(engine: Engine, work: Work, steps: int, last: float) -> Work:
    """A row's request with so many more tokens, the last of them at a moment, and its work in the last of the
    steps."""
    request, tables = work.request, engine.tables
    since, request.computed = work.start, request.computed + steps
    request.tokens += [TOKEN] * steps
    request.clock.last_token = last
    grown = tables.grow(request.pages, request.computed)
    assert grown
    tables.advance(request.pages, request.computed - steps, request.computed)
    engine.scheduler.name_pages(request, since, len(request.tokens) - 1)
    return Work(request, request.computed - 1, 1)

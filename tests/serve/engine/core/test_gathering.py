"""When prompts are held back for others: the rule, its bounds, and that nobody waits for ever."""

import math
from typing import Any

import pytest
from fakes.engine import ask, expected, prompt_of, run, start

from duetto.serve.engine.core.gathering import Costs, Outlook, PrefillBatcher, choose
from duetto.serve.runtime.compiled.shapes import Shape
from duetto.serve.runtime.equal_bits.classes import ShapeClasses

ROWS = tuple(Shape("prefill", n, 32) for n in (2, 4, 8))
CLASSES = ShapeClasses(
    (Shape("prefill", 1, 64), *ROWS), (Shape("decode", 8, 1), Shape("decode", 16, 1)), True
)


def by_area(shape: Shape) -> float:
    """A device on which padding costs what tokens cost."""
    return float(shape.area)


def look(
    tokens: list[int], free: int, rate: float = 1.0, seat: float = 1.0, seconds: Any = by_area
) -> Outlook:
    found = Costs(CLASSES, seconds).prefill(tokens)
    assert found is not None
    return Outlook(*found, free, rate, seat)


def test_prompts_wait_until_they_fill_a_shape():
    assert choose(look([30] * 8, free=1)) == 0
    assert choose(look([30] * 8, free=2)) == 2
    assert choose(look([60] * 8, free=1)) == 1


def test_prompts_that_overflow_a_shape_are_left_for_the_next():
    assert choose(look([30] * 5, free=5)) == 4
    assert choose(look([30, 30, 60], free=3)) == 3


def test_waiting_must_pay_for_the_seats_that_are_empty():
    assert choose(look([30] * 8, free=1, seat=31.0)) == 0
    assert choose(look([30] * 8, free=1, seat=33.0)) == 1
    assert choose(look([30] * 8, free=1, seat=12.0, rate=0.5)) == 0
    assert choose(look([30] * 8, free=1, seat=13.0, rate=0.5)) == 1


def test_nobody_waits_where_no_seat_becomes_free_or_no_other_is_in_line():
    assert choose(look([30] * 8, free=1, rate=0.0)) == 1
    assert choose(look([30], free=1)) == 1


def test_nobody_waits_where_a_shared_prefill_saves_nothing():
    """Each prompt has a call of its own, whatever its length."""
    alone = ShapeClasses(CLASSES.prefill[:1], CLASSES.decode, True)
    assert Costs(alone, by_area).prefill([30, 30]) is None
    assert Costs(CLASSES, lambda shape: None).prefill([30, 30]) is None


def test_shapes_that_have_not_run_cost_what_the_nearest_lets_expect():
    known = {ROWS[2]: 2.56, CLASSES.decode[1]: 1.6}
    costs = Costs(CLASSES, known.get)
    found = costs.prefill([30, 30, 60])
    assert found is not None and found[0] == pytest.approx([0.64, 0.64, 1.28])
    assert found[1] == pytest.approx([0.32, 0.32, 0.64])
    assert costs.seat(3, steps=1) == pytest.approx(0.1)


class Hand:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def gathering(clock: Hand) -> PrefillBatcher:
    """One that has seen a seat become free in every step."""
    made = PrefillBatcher(lambda: CLASSES, by_area, clock)
    for _ in range(200):
        made.dispatched(admitted=1, running=8)
    return made


def test_a_prompt_is_held_back_no_longer_than_it_is_patient():
    clock = Hand()
    made = gathering(clock)
    for patience in (math.inf, 3.0):
        request = ask(prompt_of(0, 30))
        request.clock.arrival, request.patience = 1.0, patience
        made.queued(request, waiting=2)
    line = [30] * 8
    clock.now = 3.9
    assert made.limit(1, 8, 1, line) == 0
    clock.now = 4.0
    assert made.limit(1, 8, 1, line) == 1
    request.slot = 0  # it has got a seat: the others are patient
    assert made.limit(1, 8, 1, line) == 0


def test_nobody_waits_for_a_first_token_that_is_awaited():
    made = gathering(clock := Hand())
    made.queued(request := ask(prompt_of(0, 30)), waiting=9)  # others are in line before it
    clock.now = request.clock.arrival
    assert made.limit(1, 8, 1, [30] * 8) == 1


def test_nobody_waits_while_nothing_runs():
    assert gathering(Hand()).limit(1, 0, 1, [30] * 8) == 1


def test_the_report_counts_groups_and_what_they_waited():
    clock = Hand()
    made = gathering(clock)
    for now, free in ((1.0, 1), (2.0, 1), (2.5, 2)):
        clock.now = now
        seated = made.limit(free, 8, 1, [30] * 8)
        made.dispatched(seated, running=8)
    assert made.report() == {"groups": 1, "prompts": 2, "steps": 2, "seconds": 1.5}


def test_those_who_have_left_the_line_are_forgotten():
    made = gathering(Hand())
    for _ in range(100):
        request = ask(prompt_of(0, 30))
        request.patience = 5.0
        made.queued(request, waiting=1)
        request.slot = 0
    assert len(made._hurried) <= 2


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("decode_steps", [1, 3])
def test_an_engine_gathers_prompts_and_changes_no_token(decode_steps):
    found = {}
    for patience in (0.0, math.inf):
        engine, programs = start(seats=4, budget=16, rows=4, width=4, pages=64, decode_steps=decode_steps)
        engine.gathering._seconds = lambda shape: shape.area if shape.phase == "prefill" else 0.1
        requests = [ask(prompt_of(i, 4), 3 + i * 7 % 9, i) for i in range(40)]
        for request in requests:
            request.patience = patience
            engine.submit(request)
        run(engine)
        assert [(r.outputs, r.finish_reason) for r in requests] == [expected(r) for r in requests]
        found[patience] = sum(shape.phase == "prefill" for shape, _ in programs.ran)
        assert (engine.report()["gathering"]["prompts"] > 0) == (patience > 0)
    assert found[math.inf] < found[0.0]

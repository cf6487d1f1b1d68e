"""When prompts are held back for others: the rule, its bounds, and that nobody waits for ever."""

import math
from typing import Any

import pytest
from fakes.engine import ask, expected, prompt_of, run, start

from duetto.serve.engine.core.prefill_delayer import (
    AdmissionInputs,
    CallCosts,
    PrefillDelayer,
    choose_admission_count,
)
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
) -> AdmissionInputs:
    found = CallCosts(CLASSES, seconds).prefill_seconds(tokens)
    assert found is not None
    return AdmissionInputs(*found, free, rate, seat)


def test_prompts_wait_until_they_fill_a_shape():
    assert choose_admission_count(look([30] * 8, free=1)) == 0
    assert choose_admission_count(look([30] * 8, free=2)) == 2
    assert choose_admission_count(look([60] * 8, free=1)) == 1


def test_prompts_that_overflow_a_shape_are_left_for_the_next():
    assert choose_admission_count(look([30] * 5, free=5)) == 4
    assert choose_admission_count(look([30, 30, 60], free=3)) == 3


def test_waiting_must_save_more_than_idle_slots_cost():
    assert choose_admission_count(look([30] * 8, free=1, seat=31.0)) == 0
    assert choose_admission_count(look([30] * 8, free=1, seat=33.0)) == 1
    assert choose_admission_count(look([30] * 8, free=1, seat=12.0, rate=0.5)) == 0
    assert choose_admission_count(look([30] * 8, free=1, seat=13.0, rate=0.5)) == 1


def test_prompts_start_when_no_slot_or_prompt_is_expected():
    assert choose_admission_count(look([30] * 8, free=1, rate=0.0)) == 1
    assert choose_admission_count(look([30], free=1)) == 1


def test_prompts_do_not_wait_where_sharing_saves_nothing():
    """Each prompt has a call of its own, whatever its length."""
    alone = ShapeClasses(CLASSES.prefill[:1], CLASSES.decode, True)
    assert CallCosts(alone, by_area).prefill_seconds([30, 30]) is None
    assert CallCosts(CLASSES, lambda shape: None).prefill_seconds([30, 30]) is None


def test_unmeasured_shapes_cost_what_the_nearest_shape_suggests():
    known = {ROWS[2]: 2.56, CLASSES.decode[1]: 1.6}
    costs = CallCosts(CLASSES, known.get)
    found = costs.prefill_seconds([30, 30, 60])
    assert found is not None and found[0] == pytest.approx([0.64, 0.64, 1.28])
    assert found[1] == pytest.approx([0.32, 0.32, 0.64])
    assert costs.decode_row_seconds(3, steps=1) == pytest.approx(0.1)


class Hand:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def gathering(clock: Hand) -> PrefillDelayer:
    """One that has seen a seat become free in every step."""
    made = PrefillDelayer(lambda: CLASSES, by_area, clock)
    for _ in range(200):
        made.on_dispatch(num_admitted=1, num_running=8)
    return made


def test_a_prompt_is_delayed_at_most_by_its_limit():
    clock = Hand()
    made = gathering(clock)
    for patience in (math.inf, 3.0):
        request = ask(prompt_of(0, 30))
        request.times.arrival, request.max_prefill_delay = 1.0, patience
        made.on_queued(request, num_waiting=2)
    line = [30] * 8
    clock.now = 3.9
    assert made.admission_limit(1, 8, 1, line) == 0
    clock.now = 4.0
    assert made.admission_limit(1, 8, 1, line) == 1
    request.slot = 0  # it has got a seat: the others are patient
    assert made.admission_limit(1, 8, 1, line) == 0


def test_prompts_that_queued_behind_others_are_not_delayed():
    made = gathering(clock := Hand())
    made.on_queued(request := ask(prompt_of(0, 30)), num_waiting=9)  # others are in line before it
    clock.now = request.times.arrival
    assert made.admission_limit(1, 8, 1, [30] * 8) == 1


def test_prompts_do_not_wait_while_nothing_runs():
    assert gathering(Hand()).admission_limit(1, 0, 1, [30] * 8) == 1


def test_the_report_counts_groups_and_their_waiting_time():
    clock = Hand()
    made = gathering(clock)
    for now, free in ((1.0, 1), (2.0, 1), (2.5, 2)):
        clock.now = now
        seated = made.admission_limit(free, 8, 1, [30] * 8)
        made.on_dispatch(seated, num_running=8)
    assert made.report() == {"groups": 1, "prompts": 2, "steps": 2, "seconds": 1.5}


def test_requests_that_left_the_queue_are_forgotten():
    made = gathering(Hand())
    for _ in range(100):
        request = ask(prompt_of(0, 30))
        request.max_prefill_delay = 5.0
        made.on_queued(request, num_waiting=1)
        request.slot = 0
    assert len(made._deadlines) <= 2


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("decode_steps", [1, 3])
def test_an_engine_gathers_prompts_and_changes_no_token(decode_steps):
    found = {}
    for patience in (0.0, math.inf):
        engine, executor = start(seats=4, budget=16, rows=4, width=4, pages=64, decode_steps=decode_steps)
        engine.prefill_delayer._seconds = lambda shape: shape.area if shape.phase == "prefill" else 0.1
        requests = [ask(prompt_of(i, 4), 3 + i * 7 % 9, i) for i in range(40)]
        for request in requests:
            request.max_prefill_delay = patience
            engine.submit(request)
        run(engine)
        assert [(r.output_tokens, r.finish_reason) for r in requests] == [expected(r) for r in requests]
        found[patience] = sum(shape.phase == "prefill" for shape, _ in executor.ran)
        assert (engine.report()["gathering"]["prompts"] > 0) == (patience > 0)
    assert found[math.inf] < found[0.0]

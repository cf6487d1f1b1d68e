"""Guesses in the engine: what they save, where they are cut short, and that nobody gives way to them."""

import pytest
from fakes.engine import ask, expected, prompt_of, run, start

from duetto.serve.engine.speculation.controller import Controller
from duetto.serve.engine.speculation.drafter import ConstantDrafter

pytestmark = pytest.mark.usefixtures("unchecked")  # the executor is a fake, and so is what it takes


def test_draft_tokens_save_steps_and_change_no_output():
    steps = {}
    for guesses in (0, 6):
        engine, executor = start(guesses=guesses)
        request = ask(prompt_of(1, 6), 30)
        engine.submit(request)
        run(engine)
        assert (request.output_tokens, request.finish_reason) == expected(request)
        steps[guesses] = len(executor.ran)
    assert steps[6] < steps[0]
    report = engine.report()["speculation"]
    assert 0 < report["accepted"] < report["drafted"] and report["tokens_per_pass"] > 1
    assert engine.speculation is not None and not engine.speculation.draft_states


def test_drafts_are_shortened_by_the_end_and_free_pages():
    engine, executor = start(guesses=6, pages=3, page_size=4, max_model_len=12)
    request = ask(prompt_of(0, 6), 6)
    engine.submit(request)
    run(engine)
    assert request.output_tokens == expected(request)[0]
    assert all(start + count < request.end for _, works in executor.ran for _, start, count in works)
    assert engine.scheduler.preemptions == 0


def test_no_request_is_preempted_for_draft_tokens():
    """One page is left beside two running requests: the first one's guesses take it, and the other's end with
    its page."""
    engine, executor = start(guesses=6, pages=5, page_size=4, seats=2, budget=16, max_model_len=16)
    assert engine.speculation is not None
    engine.speculation.drafter = ConstantDrafter(0)
    requests = [ask(prompt_of(i, 5), 9, i) for i in range(2)]
    for request in requests:
        engine.submit(request)
    while executor.ran[-1:] == [] or executor.ran[-1][0].phase != "verify":
        engine.step()
    rows = sorted(row for shape, works in executor.ran if shape.phase == "verify" for row in works)
    assert rows == [(0, 5, 7), (1, 5, 3)] and engine.scheduler.preemptions == 0
    run(engine)
    assert [r.output_tokens for r in requests] == [expected(r)[0] for r in requests]


def test_steps_overlap_while_speculation_does_not_pay():
    engine, executor = start(guesses=3, max_model_len=136)
    speculation = engine.speculation
    assert speculation is not None
    speculation.controller = Controller({(1, 0): 1.0, (4, 3): 100.0})
    request = ask(prompt_of(0, 6), 120)
    engine.submit(request)
    run(engine)
    assert request.output_tokens == expected(request)[0]
    asked = sum(1 for shape, _ in executor.ran if shape.phase == "verify")
    reads = {step: at for at, (event, step) in reversed(list(enumerate(executor.log))) if event == "read"}
    overlapped = sum(executor.log.index(("dispatch", n + 1)) < reads[n] for n in range(len(executor.ran) - 1))
    assert asked == 0 and overlapped >= 80

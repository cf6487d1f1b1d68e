"""Requests of many callers in one engine: ids, abandoned streams, and parameters that change under way."""

import gc
from dataclasses import replace

import pytest

from duetto import LLM, LLMEngine, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=10)
LONG = replace(GREEDY, max_tokens=60)
ONE, TWO = [5, 17, 200, 31, 8], [9, 8, 7, 6]


@pytest.fixture(autouse=True)
def no_id_is_held(llm):
    """Every test ends its requests and gives their ids back."""
    yield
    llm.abort("nobody")  # a turn, in which whatever waits for one is done
    assert not llm.has_unfinished_requests() and not llm.engine.has_work
    assert llm.engine.tables.occupancy == 0
    before = next_id(llm)
    assert int(next_id(llm)) == int(before) + 1  # no id is held


def next_id(llm: LLM) -> str:
    return llm.generate(ONE, replace(GREEDY, max_tokens=1), use_tqdm=False)[0].request_id


def alone(llm: LLM, prompt: list[int]) -> list[int]:
    return llm.generate(prompt, GREEDY, use_tqdm=False)[0].outputs[0].token_ids


def run(llm: LLM) -> dict[str, list[int]]:
    """The tokens of the queued requests by id."""
    found: dict[str, list[int]] = {}
    while llm.has_unfinished_requests():
        found |= {output.request_id: output.outputs[0].token_ids for output in llm.step()}
    return found


# ---------------------------------------------------------------- ids


def test_a_stream_reserves_its_id_before_it_begins(llm):
    first, second = alone(llm, ONE), alone(llm, TWO)
    id = str(int(next_id(llm)) + 1)
    pieces = llm.stream(ONE, GREEDY)
    with pytest.raises(ValueError, match=f"'{id}' is in use"):
        llm.add_request(TWO, GREEDY, id)
    other = llm.add_request(TWO, GREEDY)
    assert [t for piece in pieces for t in piece.token_ids] == first
    assert run(llm) == {other: second}


def test_a_stream_can_be_aborted_before_it_begins(llm):
    id = str(int(next_id(llm)) + 1)
    pieces = llm.stream(ONE, GREEDY)
    llm.abort(id)
    llm.abort(id)
    assert [(piece.token_ids, piece.finish_reason) for piece in pieces] == [([], "abort")]
    assert not llm.engine.has_work


def test_steps_of_an_engine_lose_nothing_that_its_llm_queued(llm):
    engine = LLMEngine(llm)
    (queued,) = llm.enqueue([TWO], GREEDY, use_tqdm=False)
    engine.add_request("mine", ONE, GREEDY)
    ended: dict[str, list[int]] = {}
    while engine.has_unfinished_requests() or llm.has_unfinished_requests():
        ended |= {o.request_id: o.outputs[0].token_ids for o in engine.step() if o.finished}
    assert ended == {queued: alone(llm, TWO), "mine": alone(llm, ONE)}


def test_the_id_of_an_abandoned_stream_is_free_again(llm):
    id = str(int(next_id(llm)) + 1)
    pieces = llm.stream(ONE, GREEDY)
    aborted = llm.report()["finish_reasons"].get("abort", 0)
    del pieces  # nobody has asked for its first piece
    gc.collect()
    assert llm.add_request(TWO, GREEDY, id) == id
    assert run(llm) == {id: alone(llm, TWO)}
    assert llm.report()["finish_reasons"].get("abort", 0) == aborted


def test_closing_a_stream_twice_ends_no_later_request(llm):
    id = str(int(next_id(llm)) + 1)
    pieces = llm.stream(ONE, GREEDY)
    next(pieces)
    pieces.close()
    assert llm.add_request(TWO, GREEDY, id) == id
    del pieces
    gc.collect()
    assert run(llm) == {id: alone(llm, TWO)}


def test_what_is_refused_holds_no_id(llm):
    id = str(int(next_id(llm)) + 1)
    for wrong in (lambda: llm.generate([ONE, [-1]], GREEDY), lambda: llm.stream([-1], GREEDY)):
        with pytest.raises(ValueError, match="-1 is outside the vocabulary"):
            wrong()
    with pytest.raises(ValueError, match="-1 is outside the vocabulary"):
        llm.add_request([-1], GREEDY, id)
    llm.add_request(ONE, GREEDY, id)
    assert run(llm) == {id: alone(llm, ONE)}


# ---------------------------------------------------------------- the garbage collector's moments


class Holder:
    """A stream in a cycle: only the garbage collector ends it, whenever it comes."""

    def __init__(self, llm: LLM):
        self.pieces, self.me = llm.stream(ONE, LONG), self
        next(self.pieces)


def test_a_stream_collected_inside_a_step_ends_after_it(llm, monkeypatch):
    expected, released, inside = alone(llm, TWO), [], []
    run_program, release = llm.engine.executor.run, llm.engine.scheduler.release

    def collecting(*arguments):
        inside.append(True)
        gc.collect(1)  # young objects, as the stream's are: none has grown old since collections ended
        inside.pop()
        return run_program(*arguments)

    def watched(request):
        released.append(bool(inside))
        release(request)

    gc.disable()
    try:
        Holder(llm)
        monkeypatch.setattr(llm.engine.executor, "run", collecting)
        monkeypatch.setattr(llm.engine.scheduler, "release", watched)
        assert alone(llm, TWO) == expected
    finally:
        gc.enable()
    assert released and not any(released)  # never while a step was between two states
    assert llm.report()["finish_reasons"]["abort"] > 0


# ---------------------------------------------------------------- what a caller does later


def test_parameters_are_those_of_the_submission(llm):
    params, expected = replace(GREEDY), alone(llm, ONE)
    id = llm.add_request(ONE, params)
    object.__setattr__(params, "max_tokens", 3)
    assert run(llm) == {id: expected}


def test_priorities_for_each_prompt(llm):
    few = LLM.generate(llm, [ONE, TWO], GREEDY, use_tqdm=False, priority=[1, 0])
    assert [o.outputs[0].token_ids for o in few] == [alone(llm, ONE), alone(llm, TWO)]
    with pytest.raises(ValueError, match="2 prompts have 1 priorities"):
        llm.generate([ONE, TWO], GREEDY, use_tqdm=False, priority=[1])


def test_enqueue_and_wait_for_completion(llm):
    before = llm.report()["steps"]
    ids = llm.enqueue([ONE, TWO], [GREEDY, replace(GREEDY, max_tokens=3)], use_tqdm=False)
    assert llm.report()["steps"] == before
    done = llm.wait_for_completion(use_tqdm=False)
    assert [o.request_id for o in done] == ids and all(o.finished for o in done)
    assert [o.outputs[0].token_ids for o in done] == [alone(llm, ONE), alone(llm, TWO)[:3]]
    assert llm.wait_for_completion(use_tqdm=False) == []


@pytest.mark.parametrize("wrong", [None, 5, {}], ids=str)
def test_parameters_that_are_none(llm, wrong):
    with pytest.raises(TypeError, match="parameters are a Decoder, not"):
        llm.update_params(wrong)
    with pytest.raises(TypeError, match="parameters are a Decoder, not"):
        LLM.from_params(llm.config, wrong)


def test_ids_are_released_if_the_progress_bar_fails(llm):
    with pytest.raises(ZeroDivisionError):
        llm.generate([ONE, TWO], GREEDY, use_tqdm=lambda *args, **given: 1 / 0)
    assert not llm.session.subscriptions

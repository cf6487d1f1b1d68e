"""Scored prompts take the cached pages whose tokens' scores they do not want, over a fake device."""

import pytest
from fakes.device import fake_score
from fakes.engine import ask, prompt_of, run, start

from duetto.serve.engine.core.engine import Engine
from duetto.serve.engine.core.request import Request

pytestmark = pytest.mark.usefixtures("unchecked")  # the executor is a fake, and so is what it takes

SIZES = {"page_size": 4, "pages": 40, "max_model_len": 40, "budget": 64, "chunk": 64, "seats": 4}


def scored(engine: Engine, prompt: list[int], score_from: int = 1, arrival: int = 0) -> Request:
    request = ask(prompt, 1, arrival, prompt_logprobs=0)
    request.score_from = score_from
    engine.submit(request)
    return request


def assert_scores(request: Request) -> None:
    wanted = range(request.score_from, len(request.prompt))
    assert request.prompt_scores.logprob == [fake_score(i, request.prompt[i]) for i in wanted]


def test_fully_scored_prompts_use_no_cached_page():
    engine, executor = start(**SIZES)
    for _ in range(2):
        request = scored(engine, prompt_of(0, 15))
        run(engine)
        assert_scores(request)
        assert request.num_cached_tokens == 0
    assert [works for _, works in executor.ran] == [[(0, 0, 15)], [(0, 0, 15)]]


def test_continuations_of_one_context_compute_it_once():
    engine, executor = start(**SIZES)
    context = prompt_of(0, 10)
    requests = [scored(engine, [*context, i, i + 1], 10, i) for i in range(3)]
    run(engine)
    for request in requests:
        assert_scores(request)
    assert [request.num_cached_tokens for request in requests] == [0, 8, 8]
    assert sum(count for _, works in executor.ran for *_, count in works) == 12 + 4 + 4


def test_preempted_scored_prompts_find_the_pages_of_their_outputs():
    engine, _ = start(**SIZES)
    longer = scored(engine, prompt_of(0, 17))
    request = ask(prompt_of(0, 10), 8, 1, prompt_logprobs=0)
    run(engine)
    assert_scores(longer)
    engine.submit(request)
    while request.num_output_tokens < 6:
        engine.step()
    assert len(request.page_hashes) == 3 == len(engine.scheduler.prefix_hashes(request))
    engine.preempt_and_reset_cache()
    run(engine)
    assert_scores(request)


def test_unscored_pages_are_recomputed_when_their_scores_are_wanted():
    engine, executor = start(**SIZES)
    engine.submit(ask(prompt_of(0, 12), 1))
    run(engine)
    whole, end = scored(engine, prompt_of(0, 12)), scored(engine, prompt_of(0, 12), score_from=9, arrival=1)
    run(engine)
    assert_scores(whole)
    assert_scores(end)
    assert (whole.num_cached_tokens, end.num_cached_tokens) == (0, 8)
    assert [works for _, works in executor.ran] == [[(0, 0, 12)], [(0, 0, 12)], [(1, 8, 4)]]


def test_a_continuation_at_a_page_start_recomputes_the_page_before():
    """Position 8 is scored by the hidden state of position 7: the page that ends there is computed again."""
    engine, _ = start(**SIZES)
    context = prompt_of(0, 8)
    first, other = (scored(engine, [*context, i, 9], since, i) for i, since in ((0, 1), (1, 8)))
    run(engine)
    again = scored(engine, [*context, 0, 9], 8)
    run(engine)
    for request in (first, other, again):
        assert_scores(request)
    assert (first.num_cached_tokens, other.num_cached_tokens, again.num_cached_tokens) == (0, 4, 4)


def test_preempted_scored_prompts_keep_their_scores():
    engine, _ = start(**SIZES | {"budget": 4, "chunk": 4})
    first, second = (scored(engine, prompt_of(0, 15), arrival=i) for i in range(2))
    for _ in range(3):
        engine.step()
    had = first.first_unscored
    assert 1 < had < 15
    engine.preempt_and_reset_cache()
    assert first.first_unscored == had
    run(engine)
    assert_scores(first)
    assert_scores(second)


def test_score_programs_are_compiled_before_a_calls_time_begins(monkeypatch):
    engine, executor = start(**SIZES)
    calls_in_flight: list[tuple[str, int]] = []

    def compile_late(program):
        calls_in_flight.append((str(program), len(engine.stats.in_flight_calls)))

    monkeypatch.setattr(executor.programs, "load_or_compile", compile_late)
    engine.submit(ask(prompt_of(1, 5), 1, 0))
    run(engine)
    assert calls_in_flight == []
    scored(engine, prompt_of(0, 15), arrival=1)
    run(engine)
    assert [number for _, number in calls_in_flight] == [0] and calls_in_flight[0][0].startswith("prompt[")

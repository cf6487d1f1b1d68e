"""Scored prompts take the cached pages whose tokens' scores they do not want, over a fake device."""

import pytest
from fakes.device import fake_score
from fakes.engine import ask, prompt_of, run, start

from duetto.serve.engine.core.engine import Engine
from duetto.serve.engine.core.request import Request

pytestmark = pytest.mark.usefixtures("unchecked")  # the programs are fakes, and so is what they take

SIZES = {"page_size": 4, "pages": 40, "max_model_len": 40, "budget": 64, "chunk": 64, "seats": 4}


def scored(engine: Engine, prompt: list[int], score_from: int = 1, arrival: int = 0) -> Request:
    request = ask(prompt, 1, arrival, prompt_logprobs=0)
    request.score_from = score_from
    engine.submit(request)
    return request


def assert_scores(request: Request) -> None:
    wanted = range(request.score_from, len(request.prompt))
    assert request.prompt_scores.logprob == [fake_score(i, request.prompt[i]) for i in wanted]


def test_a_prompt_whose_tokens_are_all_scored_is_computed_as_a_whole():
    engine, programs = start(**SIZES)
    for _ in range(2):
        request = scored(engine, prompt_of(0, 15))
        run(engine)
        assert_scores(request)
        assert request.cached == 0
    assert [works for _, works in programs.ran] == [[(0, 0, 15)], [(0, 0, 15)]]


def test_continuations_of_one_context_compute_it_once():
    engine, programs = start(**SIZES)
    context = prompt_of(0, 10)
    requests = [scored(engine, [*context, i, i + 1], 10, i) for i in range(3)]
    run(engine)
    for request in requests:
        assert_scores(request)
    assert [request.cached for request in requests] == [0, 8, 8]
    assert sum(count for _, works in programs.ran for *_, count in works) == 12 + 4 + 4


def test_a_scored_prompt_that_comes_back_finds_what_it_has_generated_too():
    engine, _ = start(**SIZES)
    longer = scored(engine, prompt_of(0, 17))
    request = ask(prompt_of(0, 10), 8, 1, prompt_logprobs=0)
    run(engine)
    assert_scores(longer)
    engine.submit(request)
    while request.generated < 6:
        engine.step()
    assert len(request.names) == 3 == len(engine.scheduler.usable(request))
    engine.vacate()
    run(engine)
    assert_scores(request)


def test_a_page_that_nobody_scored_is_computed_again_where_its_scores_are_wanted():
    engine, programs = start(**SIZES)
    engine.submit(ask(prompt_of(0, 12), 1))
    run(engine)
    whole, end = scored(engine, prompt_of(0, 12)), scored(engine, prompt_of(0, 12), score_from=9, arrival=1)
    run(engine)
    assert_scores(whole)
    assert_scores(end)
    assert (whole.cached, end.cached) == (0, 8)
    assert [works for _, works in programs.ran] == [[(0, 0, 12)], [(0, 0, 12)], [(1, 8, 4)]]


def test_a_continuation_that_begins_a_page_needs_the_token_before_it():
    """Position 8 is scored by the hidden state of position 7: the page that ends there is computed again."""
    engine, _ = start(**SIZES)
    context = prompt_of(0, 8)
    first, other = (scored(engine, [*context, i, 9], since, i) for i, since in ((0, 1), (1, 8)))
    run(engine)
    again = scored(engine, [*context, 0, 9], 8)
    run(engine)
    for request in (first, other, again):
        assert_scores(request)
    assert (first.cached, other.cached, again.cached) == (0, 4, 4)


def test_a_scored_prompt_that_is_preempted_keeps_the_scores_that_it_has():
    engine, _ = start(**SIZES | {"budget": 4, "chunk": 4})
    first, second = (scored(engine, prompt_of(0, 15), arrival=i) for i in range(2))
    for _ in range(3):
        engine.step()
    had = first.unscored
    assert 1 < had < 15
    engine.vacate()
    assert first.unscored == had
    run(engine)
    assert_scores(first)
    assert_scores(second)

"""Kept scores of pages: scored prompts find pages as others do, over a fake device."""

from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest
from fakes.device import Params, fake_score
from fakes.engine import ask, prompt_of, run, start

from duetto.serve.engine.core.engine import Engine
from duetto.serve.engine.core.request import Request
from duetto.serve.engine.core.scores import PageScores

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


def test_a_prompt_that_was_scored_finds_its_pages_and_their_scores():
    engine, programs = start(**SIZES)
    for cached in (0, 12):
        request = scored(engine, prompt_of(0, 15))
        run(engine)
        assert_scores(request)
        assert request.cached == cached
    assert [works for _, works in programs.ran] == [[(0, 0, 15)], [(0, 12, 3)]]


def test_continuations_of_one_context_wait_for_its_scores_and_compute_it_once():
    engine, programs = start(**SIZES)
    context = prompt_of(0, 10)
    requests = [scored(engine, [*context, i, i + 1], arrival=i) for i in range(3)]
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
    assert len(request.names) == 3 == engine.scheduler.scores.known(request, 3)
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
    """Position 8 is scored by the hidden state of position 7, which only the same next token has kept."""
    engine, _ = start(**SIZES)
    context = prompt_of(0, 8)
    first, other = (scored(engine, [*context, i, 9], since, i) for i, since in ((0, 1), (1, 8)))
    run(engine)
    again = scored(engine, [*context, 0, 9], 8)
    run(engine)
    for request in (first, other, again):
        assert_scores(request)
    assert (first.cached, other.cached, again.cached) == (0, 4, 8)


@pytest.mark.parametrize("ends", ["aborted", "preempted"])
def test_whoever_waits_for_scores_goes_on_without_them(ends: str):
    engine, _ = start(**SIZES | {"budget": 4, "chunk": 4})
    first, second = (scored(engine, prompt_of(0, 15), arrival=i) for i in range(2))
    for _ in range(2):
        engine.step()
    assert first.slot is not None and second.slot is None
    if ends == "aborted":
        engine.abort(first)
    else:
        engine.vacate()
    run(engine)
    assert_scores(second)
    if ends == "preempted":
        assert_scores(first)


def test_other_parameters_have_other_scores():
    engine, _ = start(**SIZES)
    scored(engine, prompt_of(0, 15))
    run(engine)
    assert engine.scheduler.scores.nbytes > 0
    engine.update_params(cast(Any, Params(jnp.ones((2, 2)))))
    assert engine.scheduler.scores.nbytes == 0
    request = scored(engine, prompt_of(0, 15))
    run(engine)
    assert request.cached == 0


def test_kept_scores_are_bounded_and_the_least_recently_used_go_first():
    kept = PageScores(4, most_bytes=2 * 4 * 4 * 8)  # two pages of four fields

    def request(text: int, done: int) -> Request:
        found = ask([*range(text, text + 5)], 1, prompt_logprobs=0)
        found.names = [bytes([text])]
        found.prompt_scores.extend(*(np.arange(done, dtype=float) for _ in range(4)))
        return found

    for text in (0, 1):
        kept.keep(request(text, 4), 1)
    assert kept.known(request(0, 0), 1) == 1
    found = request(0, 1)
    found.computed = 4
    kept.take(found)  # what it lacks: three of four
    assert found.prompt_scores.logprob == [0.0, 1.0, 2.0, 3.0]
    kept.keep(request(2, 4), 1)
    assert [kept.known(request(text, 0), 1) for text in (0, 1, 2)] == [1, 0, 1]
    assert kept.nbytes == kept.most_bytes
    kept.keep(request(3, 3), 1)  # not the whole page
    assert kept.known(request(3, 0), 1) == 0 and kept.nbytes == kept.most_bytes

"""The engine's steps over a fake device: overlap, prompt scores, failures and new parameters."""

from typing import Any, cast

import jax.numpy as jnp
import pytest
from fakes.device import BROKEN, Params, fake_score, next_token
from fakes.engine import ask, expected, prompt_of, run, start

pytestmark = pytest.mark.usefixtures("unchecked")  # the executor is a fake, and so is what it takes


def test_next_step_is_dispatched_before_the_last_is_read():
    engine, executor = start()
    engine.submit(ask(prompt_of(0, 6), 8))
    run(engine)
    first_read = {}
    for at, (event, step) in enumerate(executor.log):
        if event == "read":
            first_read.setdefault(step, at)
    assert len(executor.ran) == 8 == len(first_read)
    for step in range(7):
        assert executor.log.index(("dispatch", step + 1)) < first_read[step]


@pytest.mark.parametrize("budget", [1, 2, 7])
def test_prompt_scores_are_complete_under_any_budget(budget):
    engine, _ = start(budget=budget, chunk=2)
    request = ask(prompt_of(0, 11), 3, prompt_logprobs=0)
    engine.submit(request)
    run(engine)
    assert request.prompt_scores.logprob == [fake_score(i, request.prompt[i]) for i in range(1, 11)]


@pytest.mark.parametrize("how", ["dispatch", "read"])
def test_a_device_that_always_fails_is_the_callers_error(how):
    engine, executor = start()
    request = ask(prompt_of(0, 6), 8)
    engine.submit(request)
    for _ in range(3):
        engine.step()
    with pytest.raises(BROKEN):
        for _ in range(50):
            executor.fail = how
            engine.step()
    executor.fail = None
    run(engine)  # the request has kept its place, and the engine goes on
    assert request.output_tokens == expected(request)[0]


def test_parameters_change_once_the_requests_are_finished():
    engine, _ = start()
    token = next_token(prompt_of(0, 9), 0)
    request = ask(prompt_of(0, 9), 8, stop_ids=(token,))
    engine.submit(request)
    with pytest.raises(RuntimeError, match="unfinished"):
        engine.update_params(cast(Any, Params(jnp.ones((2, 2)))))
    while not request.is_finished:
        engine.step()
    assert engine.has_work  # the step that was dispatched before the stop token was read
    engine.update_params(cast(Any, Params(jnp.ones((2, 2)))))
    again = ask(prompt_of(0, 9), 2, 1)
    engine.submit(again)
    run(engine)
    assert again.num_cached_tokens == 0 and again.output_tokens == expected(again)[0]
    with pytest.raises(ValueError, match="embed is float32"):
        engine.update_params(cast(Any, Params(jnp.ones((2, 3)))))

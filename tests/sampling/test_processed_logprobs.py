"""Processed log-probabilities against numpy: those of the distribution that a token is drawn from."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from cases.programs import StoredJit
from cases.sampling import CASES, LOGITS, Request, admit_jit, distribution, edited, enter, sample_jit
from suite.marks import full_if

from duetto.sampling.accept import DraftTokens, accept_by_rejection
from duetto.sampling.checks import PROCESSED_LOGPROBS, RAW_LOGPROBS
from duetto.sampling.params import SamplingParams, request_knobs
from duetto.sampling.processors import scale_by_temperature
from duetto.sampling.sample import Sampled, Scores, score_tokens
from duetto.sampling.state import SamplingState, empty_sampling_state, load_masks

ROW, V = LOGITS.astype(np.float32), len(LOGITS)
ZERO = np.zeros(1, np.int32)
constrain = StoredJit(load_masks)
UNNARROWED = "plain", "cold", "hot"  # requests with a temperature alone


def empty_state(slots: int = 1, **options: Any) -> SamplingState:
    return empty_sampling_state(slots, V, logprobs_mode=PROCESSED_LOGPROBS, **options)


def scored(request: Request, **values: Any) -> Request:
    """The request with log-probabilities of the whole vocabulary."""
    return replace(request, params=SamplingParams(**{**vars(request.params), "logprobs": V, **values}))


def sample_row(state: SamplingState, position: int, logits: np.ndarray = ROW) -> Sampled:
    """The sample of slot 0, as numpy arrays without the axis of rows."""
    drawn = sample_jit(logits[None], np.full(1, position, np.int32), ZERO, np.ones(1, bool), state)
    return jax.tree.map(lambda x: np.asarray(x)[0], drawn)


def assert_scores(found: Sampled, probs: np.ndarray) -> None:
    """The reported numbers are those of the probabilities, in order; -inf where one is 0."""
    with np.errstate(divide="ignore"):
        want = np.log(probs)
    np.testing.assert_allclose(found.logprob, want[found.token], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(found.top_logprobs[:V], want[found.top_ids[:V]], rtol=2e-5, atol=2e-5)
    assert found.rank == (want >= want[found.token] - 1e-6).sum()
    assert sorted(found.top_ids[:V]) == list(range(V))
    assert np.isneginf(found.top_logprobs[V:]).all()


@pytest.mark.parametrize("name", CASES)
def test_drawn_tokens_have_the_scores_of_their_distribution(name):
    request = scored(CASES[name])
    for seed in range(3):
        found = sample_row(enter(empty_state(), 0, request, seed), request.position)
        assert_scores(found, distribution(LOGITS, request))


@full_if(lambda name: name in ("cold", "hot", "top_k", "top_k above V", "top_p", "min_p", "cold top_p"))
@pytest.mark.parametrize("name", CASES)
def test_greedy_scores_have_edits_and_no_temperature(name):
    request = scored(CASES[name], temperature=0.0)
    found, x = sample_row(enter(empty_state(), 0, request), request.position), edited(LOGITS, request)
    weight = np.exp(x - x.max())
    assert_scores(found, weight / weight.sum())
    assert found.rank == 1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_tokens_outside_of_a_grammar_have_minus_infinity(temperature):
    params = SamplingParams(structured_outputs={"regex": "x"}, logprobs=V, temperature=temperature)
    knobs = request_knobs(params, seed=1, stop_ids=(), prompt_len=1)
    state, allowed = admit_jit(empty_state(), np.int32(0), knobs), [1, 3, 11]
    masks = np.array([[[sum(1 << i for i in allowed)]]], np.uint32)
    state = replace(state, token_masks=constrain(state.token_masks, ZERO, ZERO + 1, masks))
    weight = np.where(np.isin(np.arange(V), allowed), np.exp(LOGITS / (temperature or 1.0)), 0)
    found = sample_row(state, 1)
    assert_scores(found, weight / weight.sum())
    assert np.isneginf(found.top_logprobs).sum() == len(found.top_logprobs) - len(allowed)


def test_a_trace_has_raw_scores_in_every_mode():
    trace = SamplingParams(trace_decode_token_ids=[4], logprobs=V).replayed()
    knobs, masks = (
        request_knobs(trace, seed=0, stop_ids=(), prompt_len=1),
        np.array([[[1 << 4]]], np.uint32),
    )
    found = []
    for mode in (RAW_LOGPROBS, PROCESSED_LOGPROBS):
        state = admit_jit(empty_sampling_state(1, V, logprobs_mode=mode), np.int32(0), knobs)
        state = replace(state, token_masks=constrain(state.token_masks, ZERO, ZERO + 1, masks))
        found.append(sample_row(state, 1))
    assert found[0].token == 4 and found[0].logprob < -0.1
    jax.tree.map(np.testing.assert_array_equal, *found)


def score_scaled(logits: Any, temperature: Any, token: Any) -> Scores:
    return score_tokens(scale_by_temperature(logits, temperature), token)


@pytest.mark.parametrize("V", [97, 512])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3, 0.05, 1e4])
def test_a_temperature_alone_gives_the_bits_of_a_trainer(temperature, V):
    """As one number that is compiled in, one that is an argument, or one of each row; in any batch."""
    logits = np.random.default_rng(1).normal(0, 4, (13, V)).astype(np.float32)
    state = empty_sampling_state(1, V, logprobs_mode=PROCESSED_LOGPROBS)
    state = enter(state, 0, Request(SamplingParams(temperature=temperature, logprobs=20)))
    position, slot = np.arange(13, dtype=np.int32) + 7, np.zeros(13, np.int32)
    found = jax.tree.map(np.asarray, sample_jit(logits, position, slot, np.ones(13, bool), state))
    rows = np.full(13, temperature, np.float32)
    ways = [
        jax.jit(lambda x, token: score_scaled(x, temperature, token))(logits, found.token),
        jax.jit(score_scaled)(logits, np.float32(temperature), found.token),
        jax.jit(score_scaled)(logits, rows, found.token),
        jax.tree.map(
            lambda *parts: np.concatenate(parts),
            *(jax.jit(score_scaled)(logits[i : i + 1], rows[:1], found.token[i : i + 1]) for i in range(13)),
        ),
    ]
    for way in ways:
        for name in ("logprob", "rank", "top_ids", "top_logprobs"):
            np.testing.assert_array_equal(getattr(found, name), getattr(way, name))
    if temperature == 1.0:
        np.testing.assert_array_equal(found.logprob, jax.jit(score_tokens)(logits, found.token).logprob)
    assert (found.logprob < 0).any()


def test_rejection_scores_are_those_of_its_target():
    request = scored(CASES["all"])
    state, token = enter(empty_state(), 0, request), np.zeros((1, 1), np.int32)
    position, drafts = np.full(1, request.position, np.int32), DraftTokens(token, np.ones((1, 1), bool))
    drawn, _ = jax.jit(accept_by_rejection)(ROW[None], position, ZERO, np.ones(1, bool), state, drafts)
    assert_scores(jax.tree.map(lambda x: np.asarray(x)[0], drawn), distribution(LOGITS, request))

"""Every sampling parameter against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.sampling import CASES, LOGITS, STOP_IDS, Request, distribution, draw, edited, enter
from suite.marks import full_if

from duetto.sampling.params import SamplingParams
from duetto.sampling.sample import score_tokens
from duetto.sampling.state import empty_sampling_state, is_stop_token


@pytest.mark.parametrize("name", CASES)
def test_draws_follow_the_distribution(name):
    """Chi-square over 4096 positions, at 5 standard deviations of its degrees of freedom; banned tokens
    never."""
    request, draws = CASES[name], 4096
    want = distribution(LOGITS, request)
    found = np.bincount(np.asarray(draw(LOGITS, request, draws).token), minlength=len(LOGITS))
    assert found[want == 0].sum() == 0
    kept = want > 0
    chi_square = ((found - draws * want)[kept] ** 2 / (draws * want[kept])).sum()
    freedom = kept.sum() - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom) + 1e-9


# Parameters that do not count where the temperature is 0.
DRAWS_ALONE = "cold", "hot", "top_k", "top_k above V", "top_p", "min_p", "cold top_p"


@full_if(lambda name: name in DRAWS_ALONE)
@pytest.mark.parametrize("name", CASES)
def test_greedy_is_the_argmax_of_the_edited_logits(name):
    request = CASES[name]
    greedy = Request(
        SamplingParams(**{**vars(request.params), "temperature": 0.0}),
        request.prompt,
        request.output,
        request.bad_words,
    )
    for seed in range(8):
        logits = np.random.default_rng(seed).normal(0, 1.0, 12)
        assert (np.asarray(draw(logits, greedy, 64).token) == edited(logits, greedy).argmax()).all()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1e-3),
        SamplingParams(temperature=1e-6),
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-30),
        SamplingParams(min_p=1.0),
        SamplingParams(logit_bias={7: 1e9}),
        SamplingParams(allowed_token_ids=[7]),
        SamplingParams(logit_bias={t: -1e9 for t in range(12) if t != 7}),
        SamplingParams(temperature=1e-3, top_k=1, top_p=1e-30, min_p=1.0, repetition_penalty=1e-3),
    ],
)
def test_extremes_leave_one_token(params):
    logits = np.where(np.arange(12) == 7, 3.0, LOGITS.clip(max=2.0))
    assert (np.asarray(draw(logits, Request(params), 64).token) == 7).all()


@pytest.mark.parametrize("logits", [np.zeros(12), np.full(12, -1e30), np.full(12, 1e30), -LOGITS * 1e4])
@pytest.mark.parametrize("name", ["hot", "top_k, top_p", "all"])
def test_extreme_logits_give_allowed_tokens(logits, name):
    tokens = np.asarray(draw(logits, CASES[name], 64).token)
    assert (tokens >= 0).all() and (tokens < 12).all()
    if np.ptp(logits) == 0 and name != "all":
        assert len(set(tokens.tolist())) > 5


def test_a_draw_is_gumbel_max_of_seed_and_position():
    request = Request(SamplingParams(temperature=0.7))
    found = np.asarray(draw(LOGITS, request, 64, seed=11).token)
    scaled = (LOGITS - LOGITS.max()).astype(np.float32) / np.float32(0.7)

    @jax.jit
    def noise(position: jax.Array) -> jax.Array:
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(11), position), (12,), jnp.float32)

    for i in range(64):
        assert found[i] == np.argmax(scaled + np.asarray(noise(request.position + i)))


def test_stop_ids():
    state = enter(empty_sampling_state(2, 12), 0, Request(SamplingParams()))
    zero, tokens, stops_jit = np.zeros(12, np.int32), np.arange(12, dtype=np.int32), jax.jit(is_stop_token)
    assert np.flatnonzero(stops_jit(state, zero, tokens)).tolist() == list(STOP_IDS)
    assert not np.asarray(stops_jit(state, zero + 1, tokens)).any()


def test_reported_scores_are_those_of_the_drawn_token():
    request = Request(SamplingParams(temperature=2.0, logprobs=2, presence_penalty=2.0, top_k=5))
    sampled = draw(LOGITS, request, 64)
    rows = np.broadcast_to(LOGITS.astype(np.float32), (64, 12))
    want = jax.jit(score_tokens)(rows, sampled.token)
    assert len(set(sampled.rank.tolist())) > 2
    for got, leaf in (
        (sampled.logprob, want.logprob),
        (sampled.rank, want.rank),
        (sampled.top_ids, want.top_ids),
    ):
        np.testing.assert_array_equal(got, leaf)

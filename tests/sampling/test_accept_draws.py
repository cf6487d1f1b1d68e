"""Rejection acceptance by draws of the real sampler, and that its target is what `sample` draws from."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.distributions import DRAWS, Language, assert_distributed, draw_distinct
from cases.programs import StoredJit
from suite.marks import full

from duetto.sampling.accept import (
    DraftTokens,
    accept_or_resample,
    acceptance_probs,
    draw_draft,
    residual_probs,
    sequential_acceptance_probs,
    target_probs,
)
from duetto.sampling.params import Knobs, SamplingParams, request_knobs
from duetto.sampling.sample import sample
from duetto.sampling.state import SamplingState, empty_sampling_state, load_history, load_knobs

trials_jit, decide_jit, sample_jit, target_jit = map(
    StoredJit, (sequential_acceptance_probs, accept_or_resample, sample, target_probs)
)
distinct_jit = StoredJit(draw_distinct, static_argnames=["count"])


def table(language: Language, length: int, which: str) -> np.ndarray:
    """Probabilities after every prefix shorter than `length`, [prefixes, V]; prefix (a, b) is row 1 + V + a *
    V + b."""
    prefixes = itertools.chain.from_iterable(
        itertools.product(range(language.V), repeat=n) for n in range(length)
    )
    return np.stack([getattr(language, which)(prefix) for prefix in prefixes])


def following(row: jax.Array, token: jax.Array, V: int) -> jax.Array:
    return row * V + token + 1


@partial(StoredJit, static_argnames=("k", "length"))
def speculate(p: jax.Array, q: jax.Array, seed: jax.Array, k: int, length: int) -> jax.Array:
    """Whole steps of draft and verification, as an engine takes them, until each row has `length` tokens: [B,
    length].

    A position that was guessed in vain is guessed again by the next step, with the same random numbers.
    """
    B, V = seed.shape[0], p.shape[1]
    rows, last = jnp.arange(B, dtype=jnp.int32), jnp.int32(len(p) - 1)

    def draft(row: jax.Array, position: jax.Array) -> tuple:
        probs = q[jnp.minimum(row, last)]
        token = draw_draft(probs, seed, position)
        return following(row, token, V), (token, probs)

    def verify(carry: tuple, guess: tuple) -> tuple:
        tokens, known, place, go_on = carry
        token, probs, real = guess
        guesses = DraftTokens(token[:, None], jnp.full((B, 1), real), probs[:, None])
        chosen, which = accept_or_resample(p[jnp.minimum(place, last)], guesses, seed, known)
        tokens = tokens.at[jnp.where(go_on, rows, B), known].set(chosen, mode="drop")
        place, known = jnp.where(go_on, following(place, chosen, V), place), known + go_on.astype(jnp.int32)
        return (tokens, known, place, go_on & (which >= 0) & (known < length)), None

    def step(_, carry: tuple) -> tuple:
        tokens, known, place = carry
        _, (token, probs) = jax.lax.scan(
            draft, place, known[None] + jnp.arange(k + 1, dtype=jnp.int32)[:, None]
        )
        real = jnp.arange(k + 1, dtype=jnp.int32) < k  # after k kept guesses a token is drawn without one
        carry, _ = jax.lax.scan(verify, (tokens, known, place, known < length), (token, probs, real))
        return carry[:3]

    zero = jnp.zeros(B, jnp.int32)
    return jax.lax.fori_loop(0, length, step, (jnp.zeros((B, length), jnp.int32), zero, zero))[0]


@pytest.mark.full
@pytest.mark.parametrize(("k", "noise"), [full(1, 3.0), (2, 0.3), full(3, 3.0)])
def test_draws_end_to_end(k: int, noise: float):
    language, length = Language(5, seed=11, noise=noise), 4
    seed = np.arange(DRAWS, dtype=np.uint32)
    p, q = (table(language, length, name) for name in "pq")
    tokens = np.asarray(speculate(p, q, seed, k, length))
    cells = tokens @ language.V ** np.arange(length - 1, -1, -1)
    assert_distributed(cells, language.joint((), length))


@pytest.mark.parametrize("count", [full(2), 3])
def test_draws_among_several_draft_tokens(count: int):
    language = Language(6, seed=3, noise=2.0)
    p, q = (np.broadcast_to(x, (DRAWS, 6)) for x in (language.p(()), language.q(())))
    seed, position = np.arange(DRAWS, dtype=np.uint32), np.full(DRAWS, 7, np.int32)
    guesses = distinct_jit(q, seed, position, count)
    assert all(len(set(row)) == count for row in np.asarray(guesses.token[:500]).tolist())
    token, which = (np.asarray(x) for x in decide_jit(p, guesses, seed, position))
    assert_distributed(token, language.p(()))
    np.testing.assert_array_equal(token[which >= 0], np.asarray(guesses.token)[which >= 0, which[which >= 0]])
    assert set(which.tolist()) == {-1, *range(count)}


def test_rows_without_draft_tokens_draw_from_the_target():
    p = np.broadcast_to(Language(6, seed=4, noise=1.0).p(()), (DRAWS, 6))
    guesses = DraftTokens(np.zeros((DRAWS, 2), np.int32), np.zeros((DRAWS, 2), bool))
    token, which = decide_jit(p, guesses, np.arange(DRAWS, dtype=np.uint32), np.zeros(DRAWS, np.int32))
    assert (np.asarray(which) == -1).all()
    assert_distributed(np.asarray(token), np.asarray(p[0]))


def test_drafts_of_the_target_itself_are_accepted():
    language = Language(6, seed=8, noise=0.0)
    p = np.broadcast_to(language.p(()), (1000, 6))
    seed, position = np.arange(1000, dtype=np.uint32), np.zeros(1000, np.int32)
    token = np.asarray(StoredJit(draw_draft)(p, seed, position))
    guesses = DraftTokens(token[:, None], np.ones((1000, 1), bool), p[:, None])
    chosen, which = decide_jit(p, guesses, seed, position)
    np.testing.assert_array_equal(chosen, token)
    np.testing.assert_array_equal(which, 0)


def test_a_row_does_not_depend_on_its_neighbours():
    rng = np.random.default_rng(0)
    p, q = (rng.dirichlet(np.ones(37), 8).astype(np.float32) for _ in range(2))
    seed, position = np.arange(8, dtype=np.uint32), np.arange(8, dtype=np.int32) * 3
    guesses = distinct_jit(q, seed, position, 3)
    given = jax.tree.map(np.asarray, (p, guesses, seed, position))
    together = jax.tree.map(np.asarray, decide_jit(*given))
    for i in range(8):
        row = jax.tree.map(lambda x, i=i: x[i : i + 1], given)
        assert [int(x[0]) for x in decide_jit(*row)] == [int(x[i]) for x in together]


def test_acceptance_and_residual_at_the_borders():
    p, q = np.array([[[0.5, 0.5, 0.0]], [[0.25, 0.0, 0.75]]], np.float32)
    accept, rest = jax.jit(acceptance_probs), jax.jit(residual_probs)
    assert [accept(p, q, np.array([t], np.int32)).tolist() for t in range(3)] == [[1.0], [1.0], [0.0]]
    np.testing.assert_allclose(rest(p, q), [[1 / 3, 2 / 3, 0]], atol=1e-7)
    np.testing.assert_array_equal(rest(p, p), p)


V = 12
LOGITS = np.random.default_rng(5).normal(0, 1.5, V).astype(np.float32)
PARAMS = {
    "plain": SamplingParams(),
    "cold, top_k": SamplingParams(temperature=0.6, top_k=5),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(temperature=1.4, min_p=0.1),
    "penalties": SamplingParams(presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.3),
    "bias and min_tokens": SamplingParams(logit_bias={2: 3.0, 7: -1e9}, min_tokens=30_000, max_tokens=None),
    "greedy": SamplingParams(temperature=0.0),
    "greedy with penalties": SamplingParams(temperature=0.0, presence_penalty=2.0, repetition_penalty=1.5),
}


def seated(params: SamplingParams) -> SamplingState:
    """One slot in the middle of its output: prompt 2 5 5 7, output 4 6 4."""
    bias = np.zeros(V, np.float32)
    for token, value in (params.logit_bias or {}).items():
        bias[token] = value
    return seat(request_knobs(params, seed=9, stop_ids=(1, 3), prompt_len=4), bias)


@StoredJit
def seat(knobs: Knobs, bias: jax.Array) -> SamplingState:
    tokens, zero = jnp.array([2, 5, 5, 7, 4, 6, 4, 0], jnp.int32), jnp.int32(0)
    state = load_knobs(empty_sampling_state(1, V), zero, knobs)
    return load_history(state, zero, tokens, jnp.int32(4), jnp.int32(7), bias)


@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS)
def test_target_is_what_sample_draws_from(params: SamplingParams):
    state = seated(params)

    def rows(count: int) -> tuple:
        position = np.arange(count, dtype=np.int32) + 7
        return np.broadcast_to(LOGITS, (count, V)), position, 0 * position, position > 0, state

    tokens, found = np.asarray(sample_jit(*rows(20_000)).token), np.asarray(target_jit(*rows(500)))
    assert_distributed(tokens, found[0])
    assert (found == found[0]).all() and abs(found[0].sum() - 1) < 1e-6


def test_the_targets_bits_do_not_depend_on_the_batch():
    rng = np.random.default_rng(2)
    state, wide = (
        seated(SamplingParams(temperature=0.8, top_p=0.9)),
        rng.normal(size=(7, V)).astype(np.float32),
    )

    def probs(logits: np.ndarray) -> np.ndarray:
        n = len(logits)
        zero, yes = np.zeros(n, np.int32), np.ones(n, bool)
        return np.asarray(target_jit(logits, zero + 7, zero, yes, state))

    together = probs(wide)
    assert all((probs(wide[i : i + 1]) == together[i]).all() for i in range(7))

"""The parts of the sampler that work on whole arrays: kept tokens, scores, argmax, sums, and a step's
cost."""

from typing import Any

import jax
import numpy as np
import pytest
from cases.programs import StoredJit
from suite.marks import full

from duetto.sampling import sample as sampler
from duetto.sampling.checks import MAX_LOGPROBS
from duetto.sampling.params import SamplingParams, request_knobs
from duetto.sampling.sample import sample, score_tokens
from duetto.sampling.search import INFINITY_BITS, threshold_by_bisection, threshold_by_radix
from duetto.sampling.state import empty_sampling_state, record_tokens

pytestmark = pytest.mark.as_served

ROWS, FEWEST = 32, 64  # rows, and the fewest tokens, of what is narrowed


def narrowing(x: np.ndarray, name: str, value: float) -> np.ndarray:
    """Which tokens one of min_p, top_k and top_p keeps of logits [B,V]. Rows and tokens that are beside them
    in a larger array, so that tests share programs, are never kept before a real one."""
    B, V = x.shape
    whole = np.zeros((ROWS, max(V, FEWEST)), np.float32)
    lowest = x.min(axis=1, keepdims=True)
    whole[:B] = lowest - 1000 * np.maximum(np.abs(lowest), 1)
    whole[:B, :V] = x
    knobs = request_knobs(SamplingParams(**{name: value}), seed=0, stop_ids=(), prompt_len=0)
    zeros = np.zeros(ROWS, np.int32)
    knobs = jax.tree.map(lambda leaf: np.broadcast_to(leaf, (ROWS, *leaf.shape)), knobs)
    rows = sampler.SamplingRows(
        knobs, zeros, np.ones(ROWS, bool), zeros, empty_sampling_state(1, whole.shape[1])
    )
    return np.asarray(narrowed(whole, rows))[:B, :V] > -1e29


@StoredJit
def narrowed(x: jax.Array, rows: sampler.SamplingRows) -> jax.Array:
    return sampler.narrow_logits(x, rows, sampler.find_rows_by_stage(rows))


@pytest.mark.parametrize("V", [full(50), 4096])
def test_kept_tokens_are_exact(V):
    x = np.random.default_rng(V).normal(0, 3, (32, V)).astype(np.float32)
    order = -np.sort(-x, axis=1)
    for k in (1, 2, 17, V - 1, V, V + 5):
        np.testing.assert_array_equal(narrowing(x, "top_k", k), x >= order[:, [min(k, V) - 1]])
    weight = np.exp(order.astype(np.float64) - order[:, :1])
    mass = weight.cumsum(axis=1) / weight.sum(axis=1, keepdims=True)
    for p in (1e-6, 0.1, 0.5, 0.9, 0.99, 0.999):
        last = (mass < p).sum(axis=1)
        clear = (np.abs(mass - p) > 3e-7).all(axis=1)
        assert clear.sum() > 16
        np.testing.assert_array_equal(
            narrowing(x, "top_p", p)[clear], (x >= np.take_along_axis(order, last[:, None], 1))[clear]
        )
    for p in (1e-3, 0.3, 0.999):
        np.testing.assert_array_equal(narrowing(x, "min_p", p), x - order[:, :1] >= np.log(np.float32(p)))


def test_neighbouring_floats_are_told_apart():
    x = -np.arange(0x3F800000, 0x3F800000 + 63, dtype=np.int32).view(np.float32)
    row = np.concatenate([np.zeros(1, np.float32), x])
    for k in (1, 2, 30, 31, 63):
        assert narrowing(np.stack([row, row * 1e-20, row * 1e20]), "top_k", k).sum(axis=1).tolist() == [k] * 3


@pytest.mark.parametrize("whole", [True, full(False)])
def test_a_gpus_search_finds_what_a_cpus_finds(whole: bool):
    """Goals that nothing, one token, some, all and not even all reach, among equal, infinite and absent
    numbers."""
    rng = np.random.default_rng(3)
    x = rng.normal(0, 3, (40, 777)).astype(np.float32).round(1)
    x[:, :4] = np.inf, np.nan, 0.0, 1e-42
    x[7], x[8], x[9] = np.inf, 0.0, np.arange(0x3F800000, 0x3F800000 + 777, dtype=np.int32).view(np.float32)
    weight = rng.integers(0, 1 << 20, x.shape).astype(np.int32) if whole else np.ones_like(x)
    goal = (weight.sum(axis=1) * rng.choice([0, 1e-9, 0.1, 0.5, 0.99, 1, 1.1], 40)).astype(weight.dtype)
    arguments = np.abs(x).view(np.int32), weight, goal
    halves, digits = (
        np.asarray(jax.jit(search)(*arguments)) for search in (threshold_by_bisection, threshold_by_radix)
    )
    np.testing.assert_array_equal(digits, halves)
    assert {0, INFINITY_BITS} < set(halves.tolist()) and len(set(halves.tolist())) > 8


def test_ties_at_the_border_stay():
    x = np.array([[2.0, 1, 1, 1, 0, -1, -1]] * 2, np.float32)
    assert narrowing(x, "top_k", 2)[0].tolist() == [True] * 4 + [False] * 3
    assert narrowing(x, "top_p", 0.5)[0].tolist() == [True] * 4 + [False] * 3
    assert narrowing(np.zeros((2, 7), np.float32), "top_p", 0.01).all()
    mixed = np.array([[0.0, -0.0, -1.0, -1, -1, -1, -1]] * 2, np.float32)
    assert narrowing(mixed, "top_k", 1)[0].tolist() == [True] * 2 + [False] * 5


def test_scores_are_those_of_the_raw_logits():
    x = np.random.default_rng(3).normal(0, 4, (6, 515)).astype(np.float32)
    x[0, 7] = x[0, 9] = x[0].max() + 1
    targets = np.array([7, 0, 5, 514, 3, 2], np.int32)
    got = jax.jit(score_tokens)(x, targets)
    want = x - np.log(np.exp(x.astype(np.float64)).sum(axis=1, keepdims=True))
    own = np.take_along_axis(want, targets[:, None], 1)
    np.testing.assert_allclose(got.logprob, own[:, 0], rtol=1e-6, atol=2e-6)
    np.testing.assert_array_equal(got.rank, (want >= own).sum(axis=1))
    assert got.rank[0] == 2
    order = np.argsort(-x, axis=1, kind="stable")[:, :MAX_LOGPROBS]
    np.testing.assert_array_equal(got.top_ids, order)
    np.testing.assert_allclose(got.top_logprobs, np.take_along_axis(want, order, 1), rtol=1e-6, atol=2e-6)


def test_scores_of_a_vocabulary_below_the_number_of_alternatives():
    got = jax.tree.map(
        np.asarray, jax.jit(score_tokens)(np.arange(12, dtype=np.float32)[None], np.zeros(1, np.int32))
    )
    assert got.top_ids.shape == got.top_logprobs.shape == (1, MAX_LOGPROBS)
    assert (got.top_ids[0, 12:] == -1).all() and (got.top_logprobs[0, 12:] == -np.inf).all()


def test_sums_are_those_of_every_order_and_width():
    x = np.random.default_rng(4).normal(0, 3, (32, 4099)).astype(np.float32)
    rows = jax.jit(sampler.pairwise_sum)(x)
    for width in (1, 2, 7):
        np.testing.assert_array_equal(jax.jit(sampler.pairwise_sum)(x[:width]), rows[:width])
    np.testing.assert_allclose(rows[:, 0], x.astype(np.float64).sum(axis=1), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("V", [1, 7, 12, 97, 4096])
@pytest.mark.parametrize("values", [3, 40, 10**6])
def test_the_largest_come_in_order(V, values):
    x = np.random.default_rng(V).integers(0, values, (16, V)).astype(np.float32)
    n = min(20, V)
    found, ids = jax.jit(sampler.top_logits, static_argnums=1)(x, n)
    np.testing.assert_array_equal(ids, np.argsort(-x, axis=1, kind="stable")[:, :n])
    np.testing.assert_array_equal(found, -np.sort(-x, axis=1)[:, :n])


@pytest.mark.parametrize("V", [1, 7, 12, 97, 4096])
def test_argmax_is_the_first_of_the_largest(V):
    x = np.random.default_rng(V).integers(0, 40, (64, V)).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(sampler.argmax)(x), x.argmax(axis=1))


def test_greedy_costs_an_argmax_and_updates_state_in_place():
    """Outside of the branches nothing of the logits' size is computed; the donated state is wholly
    aliased."""
    B, V = 8, 4096
    state, slot = empty_sampling_state(B, V), np.arange(B, dtype=np.int32)
    args = np.zeros((B, V), np.float32), slot, slot, slot >= 0, state
    equations: Any = jax.make_jaxpr(sample)(*args).eqns
    outputs = [v.aval.size for equation in equations for v in equation.outvars]
    assert max(outputs) < B * V

    def step(logits, position, slot, live, state):
        sampled = sample(logits, position, slot, live, state)
        return sampled, record_tokens(state, slot, sampled.token, live)

    memory = jax.jit(step, donate_argnums=4).lower(*args).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= sum(leaf.nbytes for leaf in jax.tree.leaves(state))

"""Heads that lie side by side in a pool, as on a TPU, are attended to as single ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.paged_attention import random

from duetto.kvcache.branches import branches, branching, keep
from duetto.kvcache.paged import Paged
from duetto.kvcache.pages import Batch, KVCache, empty_cache, side_by_side
from duetto.model.attention import AttentionParams
from duetto.model.config import Dense, GroupedQuery, LayerKind

N, K, H = 8, 4, 32
LAYERS = (LayerKind(GroupedQuery(N, K, H, sinks=True), Dense(8)),)
TABLE = np.array([[3, 0], [1, 2]], np.int32)


def cache(lanes: int) -> KVCache:
    return empty_cache(LAYERS, [4], 16, jnp.dtype("float32"), lanes=lanes)


def heads(seed: int, B: int, T: int) -> tuple[np.ndarray, ...]:
    return tuple(random(seed + i, (B, T, n, H), np.float32) for i, n in enumerate((N, K, K)))


def batch(start: list[int], T: int) -> Batch:
    rows = jnp.array(start, jnp.int32)
    tokens, count = jnp.zeros((len(rows), T), jnp.int32), jnp.full(len(rows), T, jnp.int32)
    return Batch(tokens, rows, count, (jnp.asarray(TABLE),), rows)


@jax.jit
def steps(cache: KVCache, new: tuple, sinks: jax.Array) -> list[jax.Array]:
    """A prefill, a decode, and a tree of two guesses of which one is kept, then a decode behind it."""
    reading, out = AttentionParams(H**-0.5, sinks=sinks), []
    for start, (q, k, v) in (([0, 0], new[0]), ([9, 9], new[1])):
        cache, found = Paged(batch(start, q.shape[1]), (None,))(cache, 0, q, k, v, reading)
        out.append(found)
    rows = jnp.asarray(np.repeat(TABLE, 2, axis=0))
    nodes = batch([10, 10, 10, 10], 1)
    nodes = Batch(nodes.tokens, nodes.start, nodes.count, (rows,), nodes.slot)
    attend = branching(nodes, (None,), np.array([[0], [1]]), np.array([0, 0]))
    (q, k, v), last = new[2:]
    state, found = attend(branches(cache), 0, q, k, v, reading)
    cache = keep(state, batch([10, 10], 1), (None,), (None,), jnp.array([[1], [0]], jnp.int32))
    q, k, v = last
    return [*out, found, Paged(batch([11, 11], 1), (None,))(cache, 0, q, k, v, reading)[1]]


def test_heads_side_by_side_attend_as_single_ones():
    assert cache(64).k[0].shape == (K // 2, 4, 16, 2 * H)
    sizes = (2, 9), (2, 1), (4, 1), (2, 1)
    new = tuple(heads(10 * i, *size) for i, size in enumerate(sizes))
    sinks = random(99, (N,), np.float32)
    for found, wanted in zip(steps(cache(64), new, sinks), steps(cache(1), new, sinks), strict=True):
        np.testing.assert_allclose(found, wanted, atol=2e-6)


@pytest.mark.parametrize("K, H, n", [(8, 64, 2), (8, 32, 4), (2, 32, 1), (8, 128, 1), (8, 96, 1), (1, 64, 1)])
def test_only_heads_that_fill_the_lanes_lie_side_by_side(K: int, H: int, n: int):
    assert side_by_side(K, H, 128) == n

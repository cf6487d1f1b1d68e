"""Heads that lie side by side in a pool, or have zeros behind them, as on a TPU, are attended to as single
ones."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.paged_attention import random
from cases.weights import drawn
from suite.marks import full, full_if

from duetto.kvcache.paged_attention import PagedAttend
from duetto.kvcache.pages import (
    NO_LANES,
    Batch,
    KVCache,
    empty_cache,
    heads_per_row,
    page_bytes,
    token_positions,
)
from duetto.kvcache.quantised import choose_cache_format
from duetto.kvcache.tree_attention import commit_branches, initial_branches, make_branch_attend
from duetto.model.attention import AttentionParams
from duetto.model.config import Dense, GroupedQuery, Latent, LayerKind
from duetto.model.kinds import Indexer
from duetto.model.latent import MIN_EXPANDED_QUERIES, LatentAttention, latent_spec, run_latent_attention
from duetto.model.rope import rotary_factors
from duetto.model.tree import tree_bytes
from duetto.model.weights.device_forms import Lanes

N = 8
TABLE = np.array([[3, 0, 4], [1, 2, 5]], np.int32)


def cache(K: int, H: int, kept: str, lanes: int) -> KVCache:
    layers = (LayerKind(GroupedQuery(N, K, H, sinks=True), Dense(8)),)
    return empty_cache(layers, [6], 16, choose_cache_format(kept, jnp.dtype("float32")), lanes=Lanes(lanes))


def heads(seed: int, B: int, T: int, K: int, H: int) -> tuple[np.ndarray, ...]:
    return tuple(random(seed + i, (B, T, n, H), np.float32) for i, n in enumerate((N, K, K)))


def batch(start: list[int], T: int) -> Batch:
    rows = jnp.array(start, jnp.int32)
    tokens, count = jnp.zeros((len(rows), T), jnp.int32), jnp.full(len(rows), T, jnp.int32)
    return Batch(tokens, rows, count, (jnp.asarray(TABLE),), rows)


@jax.jit
def steps(cache: KVCache, new: tuple, sinks: jax.Array) -> list[jax.Array]:
    """A prefill, a decode, and a tree of two guesses of which one is kept, then a decode behind it."""
    q, k, _ = new[0]
    reading, out = AttentionParams(q.shape[-1] ** -0.5, sinks=sinks, num_kv_heads=k.shape[2]), []
    for start, (q, k, v) in (([0, 0], new[0]), ([9, 9], new[1])):
        cache, found = PagedAttend(batch(start, q.shape[1]), (None,))(cache, 0, q, k, v, reading)
        out.append(found)
    rows = jnp.asarray(np.repeat(TABLE, 2, axis=0))
    nodes = batch([10, 10, 10, 10], 1)
    nodes = Batch(nodes.tokens, nodes.start, nodes.count, (rows,), nodes.slot)
    attend = make_branch_attend(nodes, (None,), np.array([[0], [1]]), np.array([0, 0]))
    (q, k, v), last = new[2:]
    state, found = attend(initial_branches(cache), 0, q, k, v, reading)
    cache = commit_branches(state, batch([10, 10], 1), (None,), (None,), jnp.array([[1], [0]], jnp.int32))
    q, k, v = last
    return [*out, found, PagedAttend(batch([11, 11], 1), (None,))(cache, 0, q, k, v, reading)[1]]


@pytest.mark.parametrize(
    "K, H, kept, row",
    [
        full(4, 32, "auto", (2, 64)),
        full(4, 48, "auto", (1, 192)),
        full(2, 48, "auto", (2, 64)),
        (4, 48, "int8", (4, 64)),
        full(1, 32, "auto", (1, 64)),
    ],
)
def test_heads_that_fill_lanes_attend_as_single_ones(K: int, H: int, kept: str, row: tuple[int, int]):
    heads_of, size = row
    assert cache(K, H, kept, 64).k[0].shape == (heads_of, 6, 16, size)
    sizes = (2, 9), (2, 1), (4, 1), (2, 1)
    new = tuple(heads(10 * i, *size, K, H) for i, size in enumerate(sizes))
    sinks = random(99, (N,), np.float32)
    found, wanted = (steps(cache(K, H, kept, lanes), new, sinks) for lanes in (64, 1))
    for own, same in zip(found, wanted, strict=True):
        np.testing.assert_allclose(own, same, atol=2e-6)


@full_if(lambda T, kept: T == 1 or kept == "auto")
@pytest.mark.parametrize("kept", ["auto", "int8"])
@pytest.mark.parametrize("T", [1, MIN_EXPANDED_QUERIES])
def test_padded_latent_rows_give_the_same_attention(T: int, kept: str):
    """By few queries, and by many, for which keys are made of them; an indexer's keys have zeros too."""
    mixer = Latent(4, 40, 16, 8, 16, 24, indexer=Indexer(2, 40, 8))
    layers = (LayerKind(mixer, Dense(8)),)
    weights = drawn(latent_spec(mixer, 32, 1))
    each = [random(i, (2, n, 32), np.float32) for i, n in enumerate((9, T, 1))]

    @partial(jax.jit, static_argnums=0)
    def outputs(lanes: int, weights: LatentAttention, each: list[jax.Array]) -> list[jax.Array]:
        cache = empty_cache(
            layers, [9], 16, choose_cache_format(kept, jnp.dtype("float32")), lanes=Lanes(lanes)
        )
        assert {pool.shape[-1] for pool in (cache.k[0], cache.v[0])} == ({64} if lanes == 32 else {48, 40})
        start, found = 0, []
        for x in each:
            given = batch([start, start], x.shape[1])
            turn = rotary_factors(token_positions(given), mixer.rope, mixer.rope_size)
            cache, out = run_latent_attention(weights, mixer, x, turn, PagedAttend(given, (None,)), cache, 0)
            start, found = start + x.shape[1], [*found, out]
        return found

    for own, same in zip(outputs(32, weights, each), outputs(1, weights, each), strict=True):
        np.testing.assert_allclose(own, same, atol=1e-5 * np.abs(same).max())


@pytest.mark.parametrize("kept", ["auto", "int8"])
def test_a_page_has_the_bytes_of_what_fills_its_lanes(kept: str):
    layers = LayerKind(GroupedQuery(8, 2, 96), Dense(8)), LayerKind(Latent(4, 512, 128, 64, 128), Dense(8))
    scheme = choose_cache_format(kept, jnp.bfloat16)
    found = jax.eval_shape(lambda: empty_cache(layers, [3], 16, scheme, lanes=Lanes(128)))
    padded, plain = (sum(page_bytes(layers, 16, scheme, lanes)) for lanes in (Lanes(128), NO_LANES))
    assert tree_bytes(found) == 3 * padded > 3 * plain


@pytest.mark.parametrize(
    "K, H, n",
    [(8, 64, 2), (8, 32, 4), (2, 32, 1), (8, 128, 1), (8, 96, 4), (2, 96, 1), (8, 80, 8), (1, 64, 1)],
)
def test_only_heads_that_fill_the_lanes_lie_side_by_side(K: int, H: int, n: int):
    assert heads_per_row(K, H, 128) == n

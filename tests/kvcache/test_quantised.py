"""Caches in eight bits: what a code costs, where it lies, and that no token depends on another."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.models import RANDOM
from suite.marks import full_if

from duetto.kvcache.paged_attention import PagedAttend
from duetto.kvcache.pages import Batch, KVCache, empty_cache, page_bytes, read_block, write_pool
from duetto.kvcache.quantised import (
    SCHEMES,
    QuantisedPool,
    choose_cache_format,
    empty_pool,
    quantise_heads,
    round_to_pool,
)
from duetto.model.attention import AttentionParams, causal
from duetto.model.config import Dense, GroupedQuery, Latent, LayerKind
from duetto.model.tree import tree_bytes
from duetto.serve.options.engine import CHOICES

NAMES = ("int8", "fp8_e4m3", "fp8_e5m2")
# Of a number: half of a step, as a share of the head's largest number and of the number itself.
STEPS = {"int8": (0.51 / 127, 0.0), "fp8_e4m3": (2e-6, 2.0**-4), "fp8_e5m2": (1e-7, 2.0**-3)}
K, P, W, H = 2, 9, 16, 64
CPU = jax.devices("cpu")[0]


def random(*shape: int, dtype: Any = jnp.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def pool_of(name: str, *shape: int) -> Any:
    form = jax.eval_shape(lambda: empty_pool(shape or (K, P, W, H), SCHEMES[name], CPU))
    return jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype)), form)


again, encode = jax.jit(round_to_pool), jax.jit(quantise_heads)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", NAMES)
def test_no_number_moves_by_more_than_half_a_step(name: str, dtype: Any):
    x = (random(5, 3, K, H) * 10.0 ** np.arange(-6, 9, 3)[:, None, None, None]).astype(dtype)
    found = again(pool_of(name), x)
    assert found.dtype == dtype and found.shape == x.shape
    x, found = np.asarray(x, np.float64), np.asarray(found, np.float64)
    of_head, of_number = STEPS[name]
    rounding = 0 if dtype == jnp.float32 else 2.0**-8
    allowed = of_head * np.abs(x).max(-1, keepdims=True) + (of_number + rounding) * np.abs(x)
    assert (np.abs(found - x) <= allowed).all()
    assert np.abs(found - x).max() > 0  # it is in eight bits


@pytest.mark.parametrize("name", NAMES)
def test_zeros_and_the_largest_numbers(name: str):
    x = np.zeros((3, H), np.float32)
    x[1, 0], x[2] = -3e38, 1e-38
    found = np.asarray(again(pool_of(name), x))
    assert (found[0] == 0).all() and (found[1, 1:] == 0).all() and np.isfinite(found).all()
    assert found[1, 0] == pytest.approx(-3e38, rel=0.01) and np.abs(found[2]).max() <= 1e-29


@pytest.mark.parametrize("name", NAMES)
def test_each_token_is_quantised_alone(name: str):
    """Its codes and scales do not change with what is encoded beside it."""
    x, pool = random(4, 7, K, H), pool_of(name)
    together, alone = encode(pool, x), encode(pool, x[2:3, 5:6])
    for a, b in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[2:3, 5:6], np.asarray(b))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read_back(name: str):
    """Three rows in pages of their own; a token whose page is past the pool is dropped."""
    new = random(3, 20, K, H)
    at = np.arange(20)
    pages = np.array([[4, 1], [8, 0], [2, 7]])
    page = pages[:, at // W].copy()
    page[1, 19] = P
    offset = np.broadcast_to(at % W, page.shape)
    pool = jax.jit(write_pool)(pool_of(name), *(np.asarray(x, np.int32) for x in (page, offset)), new)
    table = np.pad(pages, ((0, 0), (0, 6))).astype(np.int32)
    read = jax.jit(read_block, static_argnums=3)
    found = np.asarray(read(pool, table, np.zeros(3, np.int32), jnp.float32))  # [K,B,S,H]
    wanted = np.asarray(again(pool, new)).transpose(2, 0, 1, 3).copy()
    wanted[:, 1, 19] = 0
    np.testing.assert_array_equal(found[:, :, :20], wanted)
    untouched = np.delete(np.arange(P), [4, 1, 8, 0, 2, 7])
    assert not any(np.asarray(x)[:, untouched].any() for x in jax.tree.leaves(pool))


@pytest.mark.as_served
@pytest.mark.parametrize("name", NAMES)
def test_a_write_leaves_the_pool_in_place(name: str):
    """On a CPU too, where XLA would widen short floats: it has no temporary of a pool's size."""
    pool = pool_of(name, K, 1024, W, H)
    ints = jax.ShapeDtypeStruct((4, 1), jnp.int32)
    jitted = jax.jit(write_pool, donate_argnums=0)
    compiled = jitted.lower(pool, ints, ints, jax.ShapeDtypeStruct((4, 1, K, H), jnp.float32)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < tree_bytes(pool) / 50
    assert compiled.memory_analysis().alias_size_in_bytes == tree_bytes(pool)


def test_a_page_has_the_bytes_that_are_planned():
    """And half of what it has in 16 bits, but for the scales."""
    for layers in (RANDOM[name].layers for name in ("windows", "latent", "borrowed")):
        for name in NAMES:
            kept = choose_cache_format(name, jnp.bfloat16)
            windows = {layer.mixer.window for layer in layers}
            cache = jax.eval_shape(lambda: empty_cache(layers, [3] * len(windows), 16, kept, CPU))  # noqa: B023
            assert tree_bytes(cache) == 3 * sum(page_bytes(layers, 16, kept))
            assert all(own.shape[:2] == pool.shape[:2] for pool in cache.k for own in jax.tree.leaves(pool))
    wide = (LayerKind(Latent(4, rank=512, nope_size=12, rope_size=64, value_size=10), Dense(96)),)
    heads = [LayerKind(GroupedQuery(8, 2, size), Dense(96)) for size in (64, 128)]
    for layers, least in ((heads[:1], 1.93), (heads[1:], 1.96), (wide, 1.99)):
        whole, coded = (
            page_bytes(layers, 64, choose_cache_format(name, jnp.bfloat16)) for name in ("auto", "int8")
        )
        assert whole[0] / coded[0] > least


def test_the_option_names_every_scheme():
    assert set(CHOICES["kv_cache_dtype"]) == {"auto", *SCHEMES}


def one_row(tokens: int, window: int | None) -> Batch:
    ints = partial(np.full, dtype=np.int32)
    table = np.arange(P - 1, dtype=np.int32)[None]
    return Batch(ints((1, tokens), 1), ints(1, 0), ints(1, tokens), (table,), ints(1, 0))


@full_if(lambda name, window: (name, window) not in (("int8", None), ("fp8_e5m2", 20)))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", [None, 20])
def test_attention_reads_what_was_kept(name: str, window: int | None):
    q, (k, v) = random(1, 100, 6, H), (random(1, 100, K, H, seed=i) for i in (1, 2))
    reading, pools = AttentionParams(H**-0.5, window), (pool_of(name), pool_of(name))
    cache = KVCache(*((pool,) for pool in pools))

    @jax.jit
    def attended(cache: KVCache, batch: Batch, q: Any, k: Any, v: Any) -> tuple[jax.Array, ...]:
        kept_k, kept_v = (round_to_pool(pool, x) for pool, x in zip(pools, (k, v), strict=True))
        found = PagedAttend(batch, (window,))(cache, 0, q, k, v, reading)[1]
        return found, causal(None, 0, q, kept_k, kept_v, reading)[1], causal(None, 0, q, k, v, reading)[1]

    found, wanted, whole = map(np.asarray, attended(cache, one_row(100, window), q, k, v))
    np.testing.assert_allclose(found, wanted, atol=2e-6)
    assert 1e-4 < np.abs(found - whole).max() < 0.5


@full_if(lambda name: name == "fp8_e4m3")
@pytest.mark.parametrize("name", NAMES)
def test_latent_rows_are_made_of_what_was_kept(name: str):
    q, rows = random(1, 40, 4, 48), random(1, 40, 1, 48, seed=1)
    reading = AttentionParams(48**-0.5, expand=lambda rows, _: (rows, rows[..., :32]))
    pool = pool_of(name, 1, P, W, 48)

    @jax.jit
    def attended(cache: KVCache, batch: Batch, q: Any, rows: Any) -> tuple[KVCache, jax.Array, jax.Array]:
        cache, found = PagedAttend(batch, (None,))(cache, 0, q, rows, None, reading)
        return cache, found, causal(None, 0, q, round_to_pool(pool, rows), None, reading)[1]

    cache, found, wanted = attended(KVCache((pool,), (None,)), one_row(40, None), q, rows)
    assert isinstance(cache.k[0], QuantisedPool)
    np.testing.assert_allclose(found, wanted, atol=2e-6)

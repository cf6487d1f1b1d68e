"""Rows of tokens over pages of random keys, for the tests of attention's kernels, and the reference over
them. Arrays are NumPy's, since each operation of jax's on another shape is a program to compile."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases.programs import StoredJit

from duetto.kvcache.kernels import attention as kernels
from duetto.kvcache.kernels.tiles import LayerPages
from duetto.kvcache.pages import Batch, attend_key_blocks, read_kv_block
from duetto.kvcache.quantised import choose_cache_format, dequantise_heads, empty_pool, quantise_heads
from duetto.model.attention import AttentionParams


@dataclass(frozen=True)
class Case:
    """Rows of T tokens, of which `count` are real, after `start` others; and how they are read. Latent rows
    have a rank: so many of their H numbers are their values."""

    start: tuple[int, ...]
    count: tuple[int, ...]
    T: int = 1
    K: int = 2
    G: int = 3
    H: int = 64
    W: int = 16
    M: int = 16
    dtype: Any = jnp.float32
    window: int | None = None
    chunked: bool = False
    softcap: float | None = None
    sinks: bool = False
    rank: int | None = None
    kept: str = "auto"


def random(seed: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def inputs(case: Case, seed: int = 0) -> tuple[np.ndarray, LayerPages, AttentionParams]:
    """Random queries and pages; pages that no row owns, and slots after a row's last token, hold NaN."""
    B, pages = len(case.start), len(case.start) * case.M + 1
    q = random(seed, (B, case.T, case.K * case.G, case.H), case.dtype)
    k, v = (random(seed + i, (case.K, pages, case.W, case.H), np.float32) for i in (1, 2))
    table = np.random.default_rng(seed).permutation(pages)[:-1].reshape(B, -1)
    for row, end in enumerate(np.add(case.start, case.count)):
        unwritten = np.arange(case.M * case.W).reshape(case.M, case.W) >= end
        for pool in (k, v):
            pool[:, table[row]] = np.where(unwritten[None, ..., None], np.nan, pool[:, table[row]])
    rows = (np.asarray(x, np.int32) for x in (table, case.start, case.count))
    sinks = jax.device_put(random(seed + 3, (case.K * case.G,), case.dtype)) if case.sinks else None
    reading = AttentionParams(case.H**-0.5, case.window, case.softcap, sinks, chunked=case.chunked)
    k, v = (kept_in(case, pool) for pool in (k, v))
    if case.rank is not None:
        expand = partial(first_numbers, case.rank)
        reading = replace(reading, expand=expand, rank=case.rank)
        return q, LayerPages(k, None, *rows), reading
    return q, LayerPages(k, v, *rows), reading


def kept_in(case: Case, pool: np.ndarray) -> Any:
    """A pool of these numbers; where they are NaN, int8 has some code and a scale that is NaN."""
    pool = pool.astype(case.dtype)
    if case.kept == "auto":
        return pool
    encode = jax.jit(
        lambda x: quantise_heads(empty_pool((1, 1, 1, case.H), choose_cache_format(case.kept, case.dtype)), x)
    )
    return jax.tree.map(np.asarray, encode(pool))


def first_numbers(rank: int, rows: jax.Array, _: jax.Array) -> tuple[jax.Array, jax.Array]:
    return rows, rows[..., :rank]


def plainly(q: jax.Array, pages: LayerPages, reading: AttentionParams) -> jax.Array:
    B, T = q.shape[:2]
    batch = Batch(jnp.zeros((B, T), jnp.int32), pages.start, pages.count, (pages.table,), jnp.arange(B))
    return attend_key_blocks(
        q, batch, partial(read_kv_block, pages[:2], pages.table, reading, q.dtype), reading
    )


def compiled(
    attend: Callable[..., jax.Array], q: Any, pages: LayerPages, reading: AttentionParams
) -> np.ndarray:
    """What a function attends to, as one program."""
    constants = attend, replace(reading, sinks=None), kernels.MULTIPROCESSORS
    return np.asarray(attended(*constants, q, pages, reading.sinks))


@partial(StoredJit, static_argnames=("attend", "reading", "processors"))
def attended(
    attend: Callable[..., jax.Array],
    reading: AttentionParams,
    processors: int,
    q: Any,
    pages: LayerPages,
    sinks: Any,
) -> jax.Array:
    return attend(q, pages, replace(reading, sinks=sinks))


def real(x: Any, count: Any) -> np.ndarray:
    """The real tokens' heads [tokens,N,H]."""
    return np.asarray(x).astype(np.float32)[np.arange(x.shape[1])[None] < np.asarray(count)[:, None]]


reference = partial(compiled, plainly)


def small_pages(pages: LayerPages, W: int) -> LayerPages:
    """The same keys in pages of W tokens, in another order, behind a wider table."""
    K, P, whole, _ = pages.k.shape
    n = whole // W
    order = np.random.default_rng(5).permutation(P * n)  # where each small page goes

    def cut(pool: np.ndarray) -> np.ndarray:
        return pool.reshape(K, P * n, W, *pool.shape[3:])[:, np.argsort(order)]

    small = order[(np.asarray(pages.table)[..., None] * n + np.arange(n)).reshape(len(pages.table), -1)]
    table = np.pad(small, ((0, 0), (0, 2 * small.shape[1])), constant_values=10**6)
    k, v = jax.tree.map(cut, pages[:2])
    return pages._replace(k=k, v=v, table=table.astype(np.int32))


def with_own_path(case: Case, pages: LayerPages, root: np.ndarray, dtype: Any) -> LayerPages:
    """The rows' keys from position `root` on beside their pages, as of the nodes of a tree of guesses. In the
    pages they are spoilt."""

    def newest(pool: Any) -> np.ndarray | None:
        if pool is None:
            return None
        at = np.minimum(root[:, None] + np.arange(5), case.M * case.W - 1)
        page = np.take_along_axis(pages.table, at // case.W, axis=1)
        read = jax.tree.map(lambda x: x[:, page, at % case.W], pool)
        return np.asarray(jax.jit(dequantise_heads, static_argnums=1)(read, dtype)).transpose(1, 2, 0, 3)

    ends = zip(root, case.start, strict=True)
    hidden = [(row, at) for row, (first, last) in enumerate(ends) for at in range(first, last + 1)]
    rows, at = (np.array(x) for x in zip(*hidden, strict=True))

    def spoilt(x: Any) -> np.ndarray:
        x = np.array(x)
        x[:, pages.table[rows, at // case.W], at % case.W] = (
            np.nan if jnp.issubdtype(x.dtype, jnp.floating) else 77
        )
        return x

    own = newest(pages.k), newest(pages.v), root
    k, v = jax.tree.map(spoilt, pages[:2])
    return pages._replace(k=k, v=v, tail=own)


def on_device(case: Case) -> tuple[jax.Array, LayerPages, AttentionParams]:
    q, pages, reading = inputs(case)
    return *jax.device_put((q, pages)), reading

"""The GPU's kernels, interpreted: they equal the reference, and bits follow from a row alone."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from duetto.kvcache.kernels import attention as kernels
from duetto.kvcache.kernels.attention import attend_pages, supported
from duetto.kvcache.kernels.tiles import LayerPages
from duetto.kvcache.pages import Batch, read_keys, running_softmax
from duetto.kvcache.quantised import SCHEMES, decoded, empty_pool, encoded, kept_as
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


CASES = {
    "token": Case((0, 1, 63, 64, 200), (1, 1, 0, 1, 1)),
    "token, window, cap, sinks": Case((0, 70, 255), (1, 1, 1), window=50, softcap=5.0, sinks=True),
    "token, several parts": Case((700, 255, 900), (1, 1, 1), G=4, K=1, W=128, M=8),
    "token, bfloat16": Case((5, 300), (1, 1), K=1, G=8, H=128, W=64, M=6, dtype=jnp.bfloat16),
    "token, heads of 80": Case((0, 63, 250), (1, 0, 1), H=80),
    "token, heads of 96, window, cap, sinks": Case(
        (0, 255), (1, 1), H=96, window=50, softcap=5.0, sinks=True
    ),
    "token, heads of 192, bfloat16": Case((5, 200), (1, 1), G=1, H=192, dtype=jnp.bfloat16),
    "token, latent": Case((0, 700, 63, 300), (1, 1, 0, 1), K=1, G=20, H=80, W=64, M=12, rank=64),
    "token, latent of 48": Case((130, 2), (1, 1), K=1, G=3, H=64, rank=48),
    "token, latent of many heads": Case((900, 40), (1, 1), K=1, G=80, H=48, W=128, M=8, rank=32),
    "token, latent, bfloat16": Case((400, 9), (1, 1), K=1, H=48, W=32, rank=32, dtype=jnp.bfloat16),
    "token, int8": Case((0, 63, 300), (1, 0, 1), W=64, M=6, dtype=jnp.bfloat16, kept="int8"),
    "token, heads of 80, e4m3": Case((0, 63, 250), (1, 0, 1), H=80, window=50, kept="fp8_e4m3"),
    "token, latent, int8": Case((400, 9), (1, 1), K=1, H=48, W=32, rank=32, dtype=jnp.bfloat16, kept="int8"),
    "chunk, int8, window, sinks": Case((0, 150), (70, 33), T=70, window=40, sinks=True, kept="int8"),
    "chunk, e5m2": Case((64, 0), (40, 1), T=40, K=1, H=128, dtype=jnp.bfloat16, kept="fp8_e5m2"),
    "chunk": Case((0, 130, 9), (50, 33, 0), T=50, W=8, M=32),
    "chunk, window, cap, sinks": Case((0, 150), (70, 33), T=70, G=1, window=40, softcap=5.0, sinks=True),
    "token, in chunks": Case((0, 39, 40, 255), (1, 1, 1, 1), window=40, chunked=True),
    "chunk, in chunks": Case((0, 150), (70, 33), T=70, window=40, chunked=True, sinks=True),
    "chunk, heads of 112": Case((0, 30), (40, 17), T=40, H=112),
    "chunk, heads of 160, window, sinks": Case((0, 90), (20, 7), T=20, G=1, H=160, window=40, sinks=True),
    "chunk, bfloat16": Case((64, 0), (40, 1), T=40, K=1, G=4, H=256, W=64, M=4, dtype=jnp.bfloat16),
}


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
    encode = jax.jit(lambda x: encoded(empty_pool((1, 1, 1, case.H), kept_as(case.kept, case.dtype)), x))
    return jax.tree.map(np.asarray, encode(pool))


def first_numbers(rank: int, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    return rows, rows[..., :rank]


def plainly(q: jax.Array, pages: LayerPages, reading: AttentionParams) -> jax.Array:
    B, T = q.shape[:2]
    batch = Batch(jnp.zeros((B, T), jnp.int32), pages.start, pages.count, (pages.table,), jnp.arange(B))
    return running_softmax(q, batch, partial(read_keys, pages[:2], pages.table, reading, q.dtype), reading)


def compiled(
    attend: Callable[..., jax.Array], q: Any, pages: LayerPages, reading: AttentionParams
) -> np.ndarray:
    """What a function attends to, as one program."""
    run = jax.jit(lambda q, pages, sinks: attend(q, pages, replace(reading, sinks=sinks)))
    return np.asarray(run(q, pages, reading.sinks))


def real(x: np.ndarray, count: Any) -> np.ndarray:
    """The real tokens' heads [tokens,N,H]."""
    return x.astype(np.float32)[np.arange(x.shape[1])[None] < np.asarray(count)[:, None]]


interpreted = partial(compiled, partial(attend_pages, interpret=True))
reference = partial(compiled, plainly)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_kernels_equal_the_reference(case: Case):
    q, pages, reading = on_device(case)
    assert supported(q, pages.k, pages.v, reading) == (case.rank is None or case.dtype == jnp.bfloat16)
    found, wanted = interpreted(q, pages, reading), reference(q, pages, reading)
    assert found.shape == (*q.shape[:3], case.rank or case.H) and found.dtype == q.dtype
    tolerance = 1e-5 if case.dtype == jnp.float32 else 3e-2
    np.testing.assert_allclose(real(found, case.count), real(wanted, case.count), atol=tolerance)
    empty = np.asarray(case.count) == 0
    assert not found[empty].any()


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


@pytest.mark.parametrize(
    "name",
    [
        "token, several parts",
        "token, heads of 80",
        "token, latent",
        "token, int8",
        "chunk, int8, window, sinks",
        "chunk, window, cap, sinks",
        "chunk, heads of 112",
    ],
)
def test_bits_follow_from_the_row_alone(name: str):
    case = replace(CASES[name], dtype=jnp.bfloat16)
    q, pages, reading = inputs(case)
    together = real(interpreted(q, pages, reading), case.count)
    other = real(interpreted(q, small_pages(pages, case.W // 4), reading), case.count)
    np.testing.assert_array_equal(together, other)
    last = len(case.start) - 1
    own = pages._replace(**{f: getattr(pages, f)[last:] for f in ("table", "start", "count")})
    alone = real(interpreted(q[last:], own, reading), case.count[last:])
    np.testing.assert_array_equal(together[-len(alone) :], alone)


def test_bits_do_not_depend_on_the_chunk():
    """A prompt read in one chunk, and in two of another width."""
    case = Case((0,), (90,), T=90, K=1, window=60)
    q, pages, reading = inputs(case)
    whole = interpreted(q, pages, reading)
    first = pages._replace(count=np.array([64], np.int32))
    second = pages._replace(start=np.array([64], np.int32), count=np.array([26], np.int32))
    padded = np.pad(q[:, 64:], ((0, 0), (0, 38), (0, 0), (0, 0)))
    parts = interpreted(q[:, :64], first, reading), interpreted(padded, second, reading)[:, :26]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize("rank, processors", [(None, 2), (32, 4)])
def test_few_blocks_share_the_parts_of_all_rows(
    monkeypatch: pytest.MonkeyPatch, rank: int | None, processors: int
):
    """More parts than blocks, of rows long, short and empty: the same bits beside neighbours and alone."""
    monkeypatch.setattr(kernels, "PROCESSORS", processors)
    K, G = (2, 2) if rank is None else (1, 70)
    case = Case((0, 1000, 3, 700), (0, 1, 1, 1), K=K, G=G, H=48, W=128, M=9, rank=rank)
    q, pages, reading = inputs(case)
    found = interpreted(q, pages, reading)
    np.testing.assert_allclose(found[1:], reference(q, pages, reading)[1:], atol=1e-5)
    assert not found[0].any()
    own = pages._replace(**{f: getattr(pages, f)[3:] for f in ("table", "start", "count")})
    np.testing.assert_array_equal(found[3:], interpreted(q[3:], own, reading))


@pytest.mark.parametrize(
    "K, G, rank", [(1, 8, None), (2, 6, None), (8, 4, None), (32, 1, None), (1, 16, 512), (1, 128, 512)]
)
def test_a_long_row_fills_a_gpu(K: int, G: int, rank: int | None):
    """40960 keys of one row are parts for every multiprocessor; 1024 of 64 rows too, and no more of them than
    blocks by far."""
    reading = AttentionParams(1.0, rank=rank)

    def parts(rows: int, length: int) -> int:
        pages = LayerPages(None, None, None, np.full(rows, length - 1, np.int32), np.ones(rows, np.int32))
        heads, _, split = kernels.division(K, G, reading)
        shares = jax.jit(lambda pages: kernels.shares(pages, split, reading))(pages)
        return heads * int(np.asarray(shares)[rows])

    assert 0.9 * kernels.PROCESSORS <= parts(1, 40960) <= 2 * kernels.PROCESSORS
    assert kernels.PROCESSORS <= parts(64, 1024) <= 64 * K * 16


@pytest.mark.parametrize("kept", ["auto", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("H, rank", [(64, None), (80, None), (48, 32)])
def test_keys_of_a_path_count_like_written_ones(H: int, rank: int | None, kept: str):
    """The newest keys of a row given beside its pages, as for the nodes of a tree of guesses, leave the bits
    as they are."""
    heads = 2 if rank is None else 1
    case = Case((70, 1, 0), (1, 1, 1), K=heads, H=H, window=60, sinks=True, rank=rank, kept=kept)
    q, pages, reading = inputs(case)
    root = np.array([67, 0, 0], np.int32)

    def newest(pool: Any) -> np.ndarray | None:
        if pool is None:
            return None
        at = np.minimum(root[:, None] + np.arange(5), case.M * case.W - 1)
        page = np.take_along_axis(pages.table, at // case.W, axis=1)
        read = jax.tree.map(lambda x: x[:, page, at % case.W], pool)
        return np.asarray(jax.jit(decoded, static_argnums=1)(read, q.dtype)).transpose(1, 2, 0, 3)

    ends = zip(root, case.start, strict=True)
    hidden = [(row, at) for row, (first, last) in enumerate(ends) for at in range(first, last + 1)]
    rows, at = (np.array(x) for x in zip(*hidden, strict=True))

    def spoilt(x: np.ndarray) -> np.ndarray:
        x = x.copy()
        x[:, pages.table[rows, at // case.W], at % case.W] = (
            np.nan if jnp.issubdtype(x.dtype, jnp.floating) else 77
        )
        return x

    own = newest(pages.k), newest(pages.v), root
    k, v = jax.tree.map(spoilt, pages[:2])
    found = interpreted(q, pages._replace(k=k, v=v, own=own), reading)
    np.testing.assert_array_equal(found, interpreted(q, pages, reading))


def on_device(case: Case) -> tuple[jax.Array, LayerPages, AttentionParams]:
    q, pages, reading = inputs(case)
    return *jax.device_put((q, pages)), reading


def test_what_the_kernels_do_not_read():
    q, pages, reading = on_device(Case((0,), (1,)))
    assert not supported(q, pages.k, None, replace(reading, expand=lambda rows: (rows, rows)))
    assert not supported(q[..., :40], pages.k[..., :40], pages.v[..., :40], reading)
    assert not supported(q.astype(jnp.bfloat16), pages.k, pages.v, reading)
    assert not supported(jax.ShapeDtypeStruct((1, 1, 80, 64), q.dtype), pages.k, pages.v, reading)
    of_a_cpu = empty_pool((2, 9, 16, 64), SCHEMES["int8"], jax.devices("cpu")[0])
    assert not supported(q, of_a_cpu, of_a_cpu, reading)


def test_latent_rows_that_the_kernels_do_not_read():
    q, pages, reading = on_device(Case((0,), (1,), K=1, G=4, rank=48, dtype=jnp.bfloat16))
    assert supported(q, pages.k, None, reading)
    assert not supported(jax.ShapeDtypeStruct((1, 1, 129, 64), q.dtype), pages.k, None, reading)
    assert not supported(jax.ShapeDtypeStruct((1, 2, 4, 64), q.dtype), pages.k, None, reading)
    assert not supported(q, pages.k, None, replace(reading, rank=40))
    assert not supported(q, pages.k, None, replace(reading, rank=None))
    assert not supported(q.astype(jnp.float32), pages.k.astype(jnp.float32), None, reading)

"""Attention over pages by the CPU kernels: it equals softmax attention in float64, and bits follow from a row
alone, on every instruction set of this machine."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.paged_attention import Case, compiled, inputs, on_device, real, small_pages, with_own_path
from suite.marks import full_if

from duetto.cpu_kernels.library import load_library
from duetto.kvcache.kernels.cpu_attention import attend_cpu, fits_cpu_kernel
from duetto.kvcache.kernels.tiles import LayerPages
from duetto.kvcache.paged_attention import PagedAttend
from duetto.kvcache.pages import Batch, KVCache
from duetto.kvcache.quantised import SCHEMES, empty_pool
from duetto.model.attention import AttentionParams

pytestmark = pytest.mark.skipif(not load_library().isas, reason=load_library().refusal)
BF16 = jnp.bfloat16
EPS = {jnp.float32: 2.0**-24, BF16: 2.0**-9}  # half of a unit in the last place of 1
CASES = {
    "token": Case((0, 1, 63, 64, 200), (1, 1, 0, 1, 1)),
    "token, window, cap, sinks": Case((0, 70, 255), (1, 1, 1), window=50, softcap=5.0, sinks=True),
    "token, several parts": Case((700, 255, 1900), (1, 1, 1), G=4, K=1, W=128, M=16),
    "token, window over parts": Case((700, 255, 900), (1, 1, 1), G=7, K=3, W=128, M=8, window=300),
    "token, heads of 16": Case((0, 300, 90), (1, 1, 1), H=16, W=64, M=6, softcap=3.0),
    "token, heads of 48": Case((0, 300, 90), (1, 1, 1), K=3, G=5, H=48, W=64, M=6),
    "token, heads of 256": Case((5, 300), (1, 1), K=1, G=8, H=256, W=64, M=6),
    "token, more heads than a tile": Case((9, 300), (1, 1), K=1, G=70, W=64, M=6, sinks=True),
    "token, in chunks": Case((0, 39, 40, 255), (1, 1, 1, 1), window=40, chunked=True),
    "chunk": Case((0, 130, 9), (50, 33, 0), T=50, W=8, M=32),
    "chunk, window, cap, sinks": Case((0, 150), (70, 33), T=70, G=1, window=40, softcap=5.0, sinks=True),
    "chunk, in chunks": Case((0, 150), (70, 33), T=70, window=40, chunked=True, sinks=True),
    "chunk, several parts": Case((200, 600), (90, 300), T=300, W=64, M=16, K=1, G=2, H=32),
    "chunk, heads of 80": Case((30, 500), (20, 7), T=20, G=1, H=80, window=40, W=64, M=10),
    "chunk, heads of 128": Case((64, 0), (40, 1), T=40, K=1, G=4, H=128, W=64, M=4),
}
parametrized = pytest.mark.parametrize("isa", load_library().isas)
once_a_kind = full_if(lambda name: not name.endswith("window, cap, sinks"))  # of tokens, of chunks


def bits_of(pages: LayerPages) -> LayerPages:
    """The pages as a CPU keeps them: short floats as their bits."""
    if pages.k.dtype != BF16:
        return pages
    return pages._replace(**{f: np.asarray(getattr(pages, f)).view(np.uint16) for f in "kv"})


def given(case: Case) -> tuple[np.ndarray, LayerPages, AttentionParams]:
    q, pages, reading = inputs(case)
    return q, bits_of(pages), reading


@cache
def kernel(isa: str) -> Callable[..., jax.Array]:
    return partial(attend_cpu, isa=isa)


def attend(isa: str, q: Any, pages: LayerPages, reading: AttentionParams) -> np.ndarray:
    return compiled(kernel(isa), q, pages, reading)


def exact(case: Case) -> tuple[np.ndarray, float]:
    """The real tokens' heads in float64, and a bound of the kernel's error.

    A score is a sum of H products, times a scale, and capped. The exponential of it is exact but for some
    units in the last place. The result is a quotient of sums of n keys. Weights are rounded to q's dtype, and
    results too.
    """
    q, pages, reading = on_device(case)
    q, k, v = (np.asarray(x, np.float64) for x in (q, pages.k, pages.v))
    found, bound = [], 0.0
    for row, (start, count) in enumerate(zip(case.start, case.count, strict=True)):
        for t in range(count):
            position, (low, n) = start + t, (0, start + t + 1)
            at = np.arange(max(int(reading.first_visible(jnp.int32(position))), low), n)
            page = np.asarray(pages.table)[row, at // case.W]
            keys, values = k[:, page, at % case.W], v[:, page, at % case.W]  # [K,S,H]
            heads = q[row, t].reshape(case.K, case.G, -1)
            products = np.einsum("kgh,ksh->kgs", heads, keys) * reading.scale
            sizes = np.einsum("kgh,ksh->kgs", abs(heads), abs(keys)).max() * reading.scale
            scores = products if case.softcap is None else case.softcap * np.tanh(products / case.softcap)
            sink = -np.inf if reading.sinks is None else np.asarray(reading.sinks, np.float64)
            sink = np.broadcast_to(sink, (case.K * case.G,)).reshape(case.K, case.G, 1)
            top = np.maximum(scores.max(-1, keepdims=True), sink)
            weights = np.exp(scores - top)
            weights /= weights.sum(-1, keepdims=True) + np.exp(sink - top)
            found.append(np.einsum("kgs,ksh->kgh", weights, values).reshape(case.K * case.G, -1))
            unit = EPS[jnp.float32]
            score = unit * ((case.H + 2) * sizes + 8 * (case.softcap or 0) + abs(scores).max())
            error = 2 * (score + unit * (len(at) + 16)) + 2 * EPS[case.dtype]
            bound = max(bound, error * abs(values).max())
    return np.stack(found), bound


@once_a_kind
@parametrized
@pytest.mark.parametrize("dtype", [jnp.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_softmax_attention(name: str, dtype: Any, isa: str):
    """Pages that no row owns, and slots behind a row's last token, hold NaN."""
    case = replace(CASES[name], dtype=dtype)
    q, pages, reading = given(case)
    k, v = jax.device_put((pages.k, pages.v))
    assert fits_cpu_kernel(jax.device_put(q), k, v, reading)
    found, (wanted, bound) = attend(isa, q, pages, reading), exact(case)
    assert found.shape == q.shape and found.dtype == q.dtype
    assert abs(real(found, case.count) - wanted).max() < bound
    behind = np.arange(case.T)[None] >= np.asarray(case.count)[:, None]
    assert not np.asarray(found, np.float32)[behind].any()


def same_bits(found: Any, wanted: Any) -> bool:
    assert np.isfinite(np.asarray(wanted, np.float32)).all()
    return np.asarray(found).tobytes() == np.asarray(wanted).tobytes()


def row_of(pages: LayerPages, row: int, count: int) -> LayerPages:
    """One row alone, of `count` tokens."""
    table, start = pages.table[row : row + 1], pages.start[row : row + 1]
    return pages._replace(table=table, start=start, count=np.array([count], np.int32))


def later(pages: LayerPages, tokens: int, count: int) -> LayerPages:
    """The pages of a row that begins some tokens later."""
    return pages._replace(start=pages.start + tokens, count=np.array([count], np.int32))


@once_a_kind
@parametrized
@pytest.mark.parametrize("dtype", [jnp.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_bits_depend_neither_on_neighbours_nor_pages_nor_table(name: str, dtype: Any, isa: str):
    case = replace(CASES[name], dtype=dtype)
    q, pages, reading = inputs(case)
    together = attend(isa, q, bits_of(pages), reading)
    small = small_pages(pages, max(1, case.W // 4))
    assert same_bits(attend(isa, q, bits_of(small), reading), together)
    for row, count in enumerate(case.count):
        alone = attend(isa, q[row : row + 1], row_of(bits_of(pages), row, count), reading)
        assert same_bits(alone[0, :count], together[row, :count])


@once_a_kind
@parametrized
@pytest.mark.parametrize("dtype", [jnp.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in CASES if "chunk" in name.split(", ")[0]])
def test_bits_of_a_token_do_not_depend_on_its_chunk(name: str, dtype: Any, isa: str):
    """Tokens of a chunk alone, as in a decode, and in chunks of other sizes, as in a verification."""
    case = replace(CASES[name], dtype=dtype)
    q, pages, reading = given(case)
    whole = attend(isa, q, pages, reading)
    for row, count in enumerate(case.count):
        own = row_of(pages, row, count)
        for size in (1, 5, 32):
            for first in sorted({0, 1, 17, count - size} & set(range(count - size + 1))):
                part = q[row : row + 1, first : first + size]
                found = attend(isa, part, later(own, first, size), reading)
                assert same_bits(found[0], whole[row, first : first + size])


def in_rows(q: np.ndarray, pages: LayerPages, count: int, size: int) -> tuple[np.ndarray, LayerPages]:
    """One row's tokens as rows of `size` that go on with one another."""
    first = np.arange(0, count, size, dtype=np.int32)
    n = len(first)
    q = np.pad(q[0, :count], ((0, n * size - count), (0, 0), (0, 0))).reshape(n, size, *q.shape[2:])
    counts, table = np.minimum(size, count - first).astype(np.int32), np.repeat(pages.table, n, axis=0)
    return q, pages._replace(table=table, start=pages.start + first, count=counts)


@once_a_kind
@parametrized
@pytest.mark.parametrize("dtype", [jnp.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in CASES if "chunk" in name.split(", ")[0]])
def test_a_sequence_cut_into_rows_has_the_same_bits(name: str, dtype: Any, isa: str):
    case = replace(CASES[name], dtype=dtype)
    q, pages, reading = given(case)
    whole = attend(isa, q, pages, reading)
    for size in (1, 4, 30):
        parts = [
            in_rows(q[row : row + 1], row_of(pages, row, count), count, size)
            for row, count in enumerate(case.count)
            if count
        ]
        several = pages._replace(
            **{f: np.concatenate([getattr(own, f) for _, own in parts]) for f in ("table", "start", "count")}
        )
        found = attend(isa, np.concatenate([x for x, _ in parts]), several, reading)
        assert same_bits(real(found, several.count), real(whole, case.count))


@pytest.mark.full
@parametrized
@pytest.mark.parametrize("dtype", [jnp.float32, BF16], ids=["float32", "bfloat16"])
def test_bits_do_not_depend_on_the_number_of_rows(dtype: Any, isa: str):
    """Few rows share the threads by their keys, many by their rows."""
    starts = tuple(int(n) for n in np.random.default_rng(2).integers(0, 900, 64))
    case = Case(starts, (1,) * 64, K=3, G=3, W=64, M=15, dtype=dtype)
    q, pages, reading = given(case)
    whole = attend(isa, q, pages, reading)
    for rows in (1, 2, 3, 8, 33):
        for at in (0, 64 - rows):
            of = slice(at, at + rows)
            own = pages._replace(**{f: getattr(pages, f)[of] for f in ("table", "start", "count")})
            assert same_bits(attend(isa, q[of], own, reading), whole[of])


@pytest.mark.full
@parametrized
@pytest.mark.parametrize("dtype", [jnp.float32, BF16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("H", [64, 80])
def test_keys_of_a_path_count_like_written_ones(H: int, dtype: Any, isa: str):
    """The newest keys of a row given beside its pages, as for the nodes of a tree of guesses."""
    case = Case((70, 1, 0), (1, 1, 1), H=H, window=60, sinks=True, dtype=dtype)
    q, pages, reading = inputs(case)
    own = with_own_path(case, pages, np.array([67, 0, 0], np.int32), q.dtype)
    found, wanted = (attend(isa, q, bits_of(x), reading) for x in (own, pages))
    assert same_bits(found, wanted)


@pytest.mark.full
@parametrized
def test_nan_stays_with_the_row_that_has_it(isa: str):
    case = Case((100, 70), (1, 1), dtype=BF16)
    q, pages, reading = on_device(case)
    page = pages.table[0, 3]
    spoilt = pages._replace(k=pages.k.at[0, page, 2, 5].set(jnp.nan))
    found, wanted = (attend(isa, q, bits_of(x), reading) for x in (spoilt, pages))
    assert same_bits(found[1], wanted[1])
    assert jnp.isnan(found[0, 0, : case.G]).all() and same_bits(found[0, 0, case.G :], wanted[0, 0, case.G :])


@pytest.mark.full
@parametrized
def test_scores_far_apart_and_denormal_values(isa: str):
    """The weight of a key whose score is 200 below the highest is 0. Denormal values count as zero."""
    case = Case((99,), (1,), K=1, G=1, H=16)
    q, pages, reading = on_device(case)
    reading = replace(reading, scale=1.0)
    q = jnp.zeros_like(q).at[..., 0].set(1.0)
    at = 57 // case.W, 57 % case.W
    first = jnp.full(pages.k.shape[:3], -200.0).at[0, pages.table[0, at[0]], at[1]].set(100.0)
    keys = jnp.zeros_like(pages.k).at[..., 0].set(first)
    values = pages.v.at[0, pages.table[0, at[0]], at[1]].set(jnp.linspace(-1, 1, 16))
    found = attend(isa, q, pages._replace(k=keys, v=values), reading)
    np.testing.assert_array_equal(found[0, 0, 0], jnp.linspace(-1, 1, 16))
    tiny = attend(isa, q, pages._replace(k=keys, v=jnp.full_like(values, 1e-42)), reading)
    assert not np.asarray(tiny).any()


@pytest.mark.full
@parametrized
def test_paged_uses_the_kernel_on_pools_that_are_donated(isa: str):
    """`PagedAttend` writes the new keys into donated pools in place, and the kernel reads them."""
    case = Case((0, 63, 200), (1, 1, 1), W=64, M=4, dtype=BF16)
    q, pages, reading = on_device(case)
    finite = [jnp.where(jnp.isnan(p), 0, p) for p in pages[:2]]
    k, v = (jnp.full((3, 1, case.K, case.H), x, BF16) for x in (0.5, 2.0))
    batch = Batch(jnp.zeros((3, 1), jnp.int32), pages.start, pages.count, (pages.table,), jnp.arange(3))

    def step(cache: KVCache) -> tuple[KVCache, jax.Array]:
        return PagedAttend(batch, (None,))(cache, 0, q, k, v, reading)

    def cache(isa: str | None) -> KVCache:
        pools = ((jax.lax.bitcast_convert_type(p, jnp.uint16),) for p in finite)
        return KVCache(*pools, isa=isa)

    program = jax.jit(step, donate_argnums=0).lower(cache(isa)).compile()
    assert f"duetto_attention_{isa}" in str(program.as_text())
    memory = program.memory_analysis()
    assert memory is not None and memory.alias_size_in_bytes == sum(p.size * 2 for p in finite)
    assert memory.temp_size_in_bytes < finite[0].nbytes  # no copy of a pool
    changed, found = program(cache(isa))
    plain, wanted = jax.jit(step)(cache(None))
    np.testing.assert_array_equal(changed.k[0], plain.k[0])
    np.testing.assert_array_equal(changed.v[0], plain.v[0])
    np.testing.assert_allclose(np.float32(found), np.float32(wanted), atol=2 * 2.0**-8 * 4)


def test_what_the_kernel_does_not_read():
    q, pages, reading = given(Case((0,), (1,), dtype=BF16))
    q, pages = jax.device_put((q, pages))
    assert fits_cpu_kernel(q, pages.k, pages.v, reading)
    assert not fits_cpu_kernel(q.astype(jnp.float32), pages.k, pages.v, reading)
    assert not fits_cpu_kernel(q.astype(jnp.float16), pages.k, pages.v, reading)
    assert not fits_cpu_kernel(q[..., :40], pages.k[..., :40], pages.v[..., :40], reading)
    assert not fits_cpu_kernel(q, pages.k, None, replace(reading, rank=48))
    assert not fits_cpu_kernel(q, pages.k, pages.v, replace(reading, expand=lambda rows, _: (rows, rows)))
    codes = empty_pool((2, 9, 16, 64), SCHEMES["int8"], jax.devices("cpu")[0])
    assert not fits_cpu_kernel(q, codes, codes, reading)

"""The GPU's kernels, interpreted: they equal the reference, and bits follow from a row alone."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.paged_attention import (
    Case,
    compiled,
    inputs,
    on_device,
    real,
    reference,
    small_pages,
    with_own_path,
)
from suite.marks import full, full_if

from duetto.kvcache.kernels import attention as kernels
from duetto.kvcache.kernels.attention import attend_gpu, fits_triton_kernel
from duetto.kvcache.kernels.tiles import LayerPages
from duetto.kvcache.quantised import SCHEMES, empty_pool
from duetto.model.attention import AttentionParams

CASES = {
    "token": Case((0, 1, 63, 64, 200), (1, 1, 0, 1, 1)),
    "token, window, cap, sinks": Case((0, 70, 255), (1, 1, 1), window=50, softcap=5.0, sinks=True),
    "token, several parts": Case((700, 255, 900), (1, 1, 1), G=4, K=1, W=128, M=8),
    "token, bfloat16": Case((5, 300), (1, 1), K=1, G=8, H=128, W=64, M=6, dtype=jnp.bfloat16),
    "token, latent": Case((0, 700, 63, 300), (1, 1, 0, 1), K=1, G=20, H=80, W=64, M=12, rank=64),
    "token, latent of many heads": Case((900, 40), (1, 1), K=1, G=80, H=48, W=128, M=8, rank=32),
    "chunk, latent of many heads": Case((64, 0), (20, 7), T=20, K=1, G=80, H=48, W=64, M=4, rank=32),
    "token, heads of 80, e4m3": Case((0, 63, 250), (1, 0, 1), H=80, window=50, kept="fp8_e4m3"),
    "chunk, window, cap, sinks": Case((0, 150), (70, 33), T=70, G=1, window=40, softcap=5.0, sinks=True),
    "token, in chunks": Case((0, 39, 40, 255), (1, 1, 1, 1), window=40, chunked=True),
    "chunk, in chunks": Case((0, 150), (70, 33), T=70, window=40, chunked=True, sinks=True),
    "chunk, heads of 160, window, sinks": Case((0, 90), (20, 7), T=20, G=1, H=160, window=40, sinks=True),
}
MORE_CASES = {  # whose comparison with the reference is a repetition
    "token, heads of 80": Case((0, 63, 250), (1, 0, 1), H=80),
    "token, heads of 96, window, cap, sinks": Case(
        (0, 255), (1, 1), H=96, window=50, softcap=5.0, sinks=True
    ),
    "token, heads of 192, bfloat16": Case((5, 200), (1, 1), G=1, H=192, dtype=jnp.bfloat16),
    "token, latent of 48": Case((130, 2), (1, 1), K=1, G=3, H=64, rank=48),
    "token, latent, bfloat16": Case((400, 9), (1, 1), K=1, H=48, W=32, rank=32, dtype=jnp.bfloat16),
    "chunk, latent": Case((0, 9, 70), (50, 0, 33), T=50, K=1, G=20, H=80, rank=64),
    "chunk, latent, bfloat16": Case((70, 0), (40, 1), T=40, K=1, H=48, W=32, rank=32, dtype=jnp.bfloat16),
    "token, int8": Case((0, 63, 300), (1, 0, 1), W=64, M=6, dtype=jnp.bfloat16, kept="int8"),
    "token, latent, int8": Case((400, 9), (1, 1), K=1, H=48, W=32, rank=32, dtype=jnp.bfloat16, kept="int8"),
    "chunk, int8, window, sinks": Case((0, 150), (70, 33), T=70, window=40, sinks=True, kept="int8"),
    "chunk, e5m2": Case((64, 0), (40, 1), T=40, K=1, H=128, dtype=jnp.bfloat16, kept="fp8_e5m2"),
    "chunk": Case((0, 130, 9), (50, 33, 0), T=50, W=8, M=32),
    "chunk, heads of 112": Case((0, 30), (40, 17), T=40, H=112),
    "chunk, bfloat16": Case((64, 0), (40, 1), T=40, K=1, G=4, H=256, W=64, M=4, dtype=jnp.bfloat16),
}
# What these show the other cases show together.
REPETITIONS = "token", "token, latent of many heads", "chunk, in chunks"


interpreted = partial(compiled, partial(attend_gpu, interpret=True))


@full_if(lambda case: any(case is CASES[name] for name in REPETITIONS))
@pytest.mark.parametrize(
    "case", [*CASES.values(), *map(full, MORE_CASES.values())], ids=[*CASES, *MORE_CASES]
)
def test_kernels_equal_the_reference(case: Case):
    q, pages, reading = on_device(case)
    assert fits_triton_kernel(q, pages.k, pages.v, reading)
    found, wanted = interpreted(q, pages, reading), reference(q, pages, reading)
    assert found.shape == (*q.shape[:3], case.rank or case.H) and found.dtype == q.dtype
    tolerance = 1e-5 if case.dtype == jnp.float32 else 3e-2
    np.testing.assert_allclose(real(found, case.count), real(wanted, case.count), atol=tolerance)
    empty = np.asarray(case.count) == 0
    assert not found[empty].any()


@pytest.mark.parametrize(
    "name",
    [
        "token, several parts",
        full("token, heads of 80"),
        full("token, latent"),
        full("token, int8"),
        full("chunk, int8, window, sinks"),
        full("chunk, window, cap, sinks"),
        full("chunk, heads of 112"),
        "chunk, latent",
    ],
)
def test_bits_follow_from_the_row_alone(name: str):
    case = replace((CASES | MORE_CASES)[name], dtype=jnp.bfloat16)
    q, pages, reading = inputs(case)
    together = real(interpreted(q, pages, reading), case.count)
    other = real(interpreted(q, small_pages(pages, case.W // 4), reading), case.count)
    np.testing.assert_array_equal(together, other)
    last = len(case.start) - 1
    own = pages._replace(**{f: getattr(pages, f)[last:] for f in ("table", "start", "count")})
    alone = real(interpreted(q[last:], own, reading), case.count[last:])
    np.testing.assert_array_equal(together[-len(alone) :], alone)


@pytest.mark.parametrize("name", ["token, latent", "chunk, latent"])
def test_queries_of_a_latent_layer_may_come_in_two_parts(name: str):
    q, pages, reading = inputs(replace((CASES | MORE_CASES)[name], dtype=jnp.bfloat16))
    latent, rest = jax.device_put((q[..., : reading.rank], q[..., reading.rank :]))
    parts = replace(reading, rope_queries=rest)
    assert fits_triton_kernel(latent, jax.ShapeDtypeStruct(pages.k.shape, pages.k.dtype), None, parts)
    run = jax.jit(
        lambda q, rest, pages: attend_gpu(q, pages, replace(reading, rope_queries=rest), interpret=True)
    )
    np.testing.assert_array_equal(run(latent, rest, pages), interpreted(q, pages, reading))


@pytest.mark.parametrize("rank", [None, 32])
def test_bits_do_not_depend_on_the_chunk(rank: int | None):
    """A prompt read in one chunk, and in two of another width."""
    case = Case((0,), (90,), T=90, K=1, window=None if rank else 60, rank=rank)
    q, pages, reading = inputs(case)
    whole = interpreted(q, pages, reading)
    first = pages._replace(count=np.array([64], np.int32))
    second = pages._replace(start=np.array([64], np.int32), count=np.array([26], np.int32))
    padded = np.pad(q[:, 64:], ((0, 0), (0, 38), (0, 0), (0, 0)))
    parts = interpreted(q[:, :64], first, reading), interpreted(padded, second, reading)[:, :26]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


@pytest.mark.parametrize("rank, processors", [full(None, 2), (32, 4)])
def test_few_blocks_share_the_parts_of_all_rows(
    monkeypatch: pytest.MonkeyPatch, rank: int | None, processors: int
):
    """More parts than blocks, of rows long, short and empty: the same bits beside neighbours and alone."""
    monkeypatch.setattr(kernels, "MULTIPROCESSORS", processors)
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
        heads, _, split = kernels.plan_key_split(K, G, np.dtype(np.float16), reading)
        shares = jax.jit(lambda pages: kernels.parts_before_row(pages, split, reading))(pages)
        return heads * int(np.asarray(shares)[rows])

    assert 0.9 * kernels.MULTIPROCESSORS <= parts(1, 40960) <= 2 * kernels.MULTIPROCESSORS
    assert kernels.MULTIPROCESSORS <= parts(64, 1024) <= 64 * K * 16


@full_if(lambda H, kept: H != 64 or kept != "int8")
@pytest.mark.parametrize("kept", ["auto", "int8", "fp8_e4m3"])
@pytest.mark.parametrize("H, rank", [(64, None), (80, None), (48, 32)])
def test_keys_of_a_path_count_like_written_ones(H: int, rank: int | None, kept: str):
    """The newest keys of a row given beside its pages, as for the nodes of a tree of guesses, leave the bits
    as they are."""
    heads = 2 if rank is None else 1
    case = Case((70, 1, 0), (1, 1, 1), K=heads, H=H, window=60, sinks=True, rank=rank, kept=kept)
    q, pages, reading = inputs(case)
    own = with_own_path(case, pages, np.array([67, 0, 0], np.int32), q.dtype)
    found = interpreted(q, own, reading)
    np.testing.assert_array_equal(found, interpreted(q, pages, reading))


def test_what_the_kernels_do_not_read():
    q, pages, reading = on_device(Case((0,), (1,)))
    assert not fits_triton_kernel(q, pages.k, None, replace(reading, expand=lambda rows, _: (rows, rows)))
    assert not fits_triton_kernel(q[..., :40], pages.k[..., :40], pages.v[..., :40], reading)
    assert not fits_triton_kernel(q.astype(jnp.bfloat16), pages.k, pages.v, reading)
    assert not fits_triton_kernel(jax.ShapeDtypeStruct((1, 1, 80, 64), q.dtype), pages.k, pages.v, reading)
    of_a_cpu = empty_pool((2, 9, 16, 64), SCHEMES["int8"], jax.devices("cpu")[0])
    assert not fits_triton_kernel(q, of_a_cpu, of_a_cpu, reading)


def test_latent_rows_that_the_kernels_do_not_read():
    q, pages, reading = on_device(Case((0,), (1,), K=1, G=4, rank=48, dtype=jnp.bfloat16))
    assert fits_triton_kernel(q, pages.k, None, reading)
    assert not fits_triton_kernel(jax.ShapeDtypeStruct((1, 1, 129, 64), q.dtype), pages.k, None, reading)
    assert fits_triton_kernel(jax.ShapeDtypeStruct((1, 2, 4, 64), q.dtype), pages.k, None, reading)
    assert not fits_triton_kernel(q, pages.k, None, replace(reading, rank=40))
    assert not fits_triton_kernel(q, pages.k, None, replace(reading, rank=None))
    assert not fits_triton_kernel(q.astype(jnp.float32), pages.k, None, reading)

"""The TPU's kernel, interpreted: it equals the reference, and bits follow from a row alone. Vector memory
that no copy has written holds NaN there."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.gpus import traced_for_tpu
from cases.paged_attention import Case, inputs, real, reference, small_pages, with_own_path
from suite.marks import full, full_if

from duetto.kvcache.kernels import tpu_attention
from duetto.kvcache.kernels.sharded_attention import attend_on_devices
from duetto.kvcache.kernels.tiles import LayerPages
from duetto.kvcache.kernels.tpu_attention import TPU_DECODE, fits_tpu_kernel, has_tpu_kernel
from duetto.kvcache.quantised import SCHEMES, empty_pool
from duetto.model.attention import AttentionParams
from duetto.model.gpus import disable_kernels

CASES = {
    "short rows": Case((0, 1, 63, 255, 200), (1, 1, 0, 1, 1), H=128),
    "several blocks": Case((1100, 0, 255, 256, 1023), (1, 0, 1, 1, 1), H=128, W=64, M=20),
    "the first and last rows are empty": Case((0, 9, 0, 300, 0), (0, 1, 0, 1, 0), H=128, M=20),
    "no row has a token": Case((5, 0), (0, 0), H=128),
    "window, cap, sinks": Case(
        (0, 70, 255, 900), (1, 1, 1, 1), H=128, M=64, window=50, softcap=5.0, sinks=True
    ),
    "in chunks": Case((0, 39, 40, 900), (1, 1, 1, 1), H=128, M=64, window=300, chunked=True),
    "many key heads": Case((300, 2), (1, 1), K=11, G=1, H=128, M=20),
    "bfloat16": Case((600, 3), (1, 1), K=1, G=9, H=256, W=64, M=10, dtype=jnp.bfloat16),
    "pages wider than a tile": Case((700, 390), (1, 1), H=128, W=384, M=2),
    "latent": Case((600, 5), (1, 1), K=1, G=20, H=384, M=40, rank=256),
    "chunk": Case((0, 300, 9, 250), (50, 33, 0, 9), T=50, H=128, M=24),
    "chunk, window, cap, sinks": Case(
        (0, 550), (70, 33), T=70, G=1, H=128, M=40, window=40, softcap=5.0, sinks=True
    ),
    "chunk, in chunks": Case((0, 550), (70, 33), T=70, H=128, M=40, window=300, chunked=True, sinks=True),
    "chunk, latent": Case((0, 300), (5, 3), T=5, K=1, G=20, H=384, M=20, rank=256),
    "chunk, bfloat16": Case((64, 0), (40, 1), T=40, K=1, G=4, H=256, W=64, M=4, dtype=jnp.bfloat16),
}  # fmt: skip


# What these show the other cases show together.
REPETITIONS = (
    "short rows", "the first and last rows are empty", "many key heads", "chunk", "chunk, in chunks",
    "chunk, bfloat16",
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    """Blocks of one or two tiles, so that rows have several."""
    monkeypatch.setattr(tpu_attention, "COPY_BYTES", 1 << 20)


def interpreted(q: Any, pages: LayerPages, reading: AttentionParams) -> np.ndarray:
    def anew(*given: Any) -> Any:  # a function of its own is traced again, with the sizes of this test
        return tpu_attention.attend_chunks(*given)

    run = jax.jit(lambda q, pages: attend_on_devices(anew, q, pages, reading, True))
    return np.asarray(run(q, pages))


@full_if(lambda case: any(case is CASES[name] for name in REPETITIONS))
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_the_kernel_equals_the_reference(case: Case):
    q, pages, reading = inputs(case)
    assert fits_tpu_kernel(q, pages, reading)
    found, wanted = interpreted(q, pages, reading), reference(q, pages, reading)
    assert found.shape == (*q.shape[:3], case.rank or case.H) and found.dtype == q.dtype
    tolerance = 1e-5 if case.dtype == jnp.float32 else 3e-2
    np.testing.assert_allclose(real(found, case.count), real(wanted, case.count), atol=tolerance)
    assert np.isfinite(found).all()
    assert not found[np.asarray(case.count) == 0].any()


@pytest.mark.parametrize("name", [full("several blocks"), full("window, cap, sinks"), "latent", "chunk"])
def test_bits_follow_from_the_row_alone(name: str):
    case = CASES[name]
    q, pages, reading = inputs(case)
    together = real(interpreted(q, pages, reading), case.count)
    other = real(interpreted(q, small_pages(pages, case.W // 2), reading), case.count)
    np.testing.assert_array_equal(together, other)
    own = pages._replace(**{f: getattr(pages, f)[-1:] for f in ("table", "start", "count")})
    alone = real(interpreted(q[-1:], own, reading), case.count[-1:])
    np.testing.assert_array_equal(together[-len(alone) :], alone)


@pytest.mark.parametrize("name, most", [full("MAX_PRODUCT_QUERIES", 24), ("MAX_HELD_BYTES", 1 << 18)])
def test_a_prompt_may_be_read_in_smaller_chunks(monkeypatch: pytest.MonkeyPatch, name: str, most: int):
    q, pages, reading = inputs(Case((0,), (90,), T=90, K=1, H=128, W=64, M=2, window=60, sinks=True))
    whole = interpreted(q, pages, reading)
    assert tpu_attention.max_chunk_rows(1, 128, 128, 4) > 90 * 3
    monkeypatch.setattr(tpu_attention, name, most)
    assert tpu_attention.max_chunk_rows(1, 128, 128, 4) < 90
    # on a CPU bits of a product follow its rows
    np.testing.assert_allclose(interpreted(q, pages, reading), whole, atol=1e-6)


@pytest.mark.parametrize("copied", [1 << 18, full(1 << 24)])
def test_bits_do_not_depend_on_the_size_of_copies(monkeypatch: pytest.MonkeyPatch, copied: int):
    q, pages, reading = inputs(CASES["several blocks"])
    expected = interpreted(q, pages, reading)
    size = tpu_attention.copied_block_tokens(pages)
    monkeypatch.setattr(tpu_attention, "COPY_BYTES", copied)
    assert tpu_attention.copied_block_tokens(pages) != size
    np.testing.assert_array_equal(interpreted(q, pages, reading), expected)


@full_if(lambda rank, dtype: (rank is None) != (dtype == jnp.float32))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rank", [None, 128])
def test_keys_of_a_path_count_like_written_ones(rank: int | None, dtype: Any):
    """Given beside the pages as for nodes of a tree of guesses, at a tile's edge too."""
    case = Case(
        (70, 1, 0, 257), (1, 1, 1, 1), K=2 - bool(rank), H=256, M=20, sinks=True, rank=rank, dtype=dtype
    )
    q, pages, reading = inputs(case)
    root = np.array([67, 0, 0, 254], np.int32)
    own = with_own_path(case, pages, root, q.dtype)
    has_pages = np.arange(case.M)[None] * case.W < root[:, None]
    own = own._replace(table=np.where(has_pages, own.table, 10**6).astype(np.int32))
    np.testing.assert_array_equal(interpreted(q, own, reading), interpreted(q, pages, reading))


def test_tpu_programs_have_the_kernel_unless_it_is_refused():
    q, pages, reading = inputs(Case((0,), (1,), H=128))
    several = np.repeat(q, 2, axis=1)
    assert not has_tpu_kernel(q, pages, reading), "this is a CPU"
    with traced_for_tpu():
        assert has_tpu_kernel(q, pages, reading) and has_tpu_kernel(several, pages, reading)
        with disable_kernels({TPU_DECODE.name}):
            assert not has_tpu_kernel(q, pages, reading) and has_tpu_kernel(several, pages, reading)


def test_what_the_kernel_does_not_read():
    q, pages, reading = inputs(Case((0,), (1,), H=128))

    def wide(*sizes: int) -> LayerPages:
        pool = jax.ShapeDtypeStruct(sizes, q.dtype)
        return pages._replace(k=pool, v=pool)

    assert fits_tpu_kernel(q, pages, reading)
    own = (q, q, pages.start)
    assert fits_tpu_kernel(q, pages._replace(tail=own), reading)
    assert not fits_tpu_kernel(np.repeat(q, 2, axis=1), pages._replace(tail=own), reading), (
        "two tokens of a node"
    )
    assert not fits_tpu_kernel(q, wide(2, 9, 16, 64), reading), "rows that fill no lanes"
    assert not fits_tpu_kernel(q, wide(2, 9, 4, 128), reading), "pages of four tokens"
    assert not fits_tpu_kernel(q, wide(64, 9, 16, 512), reading), "more than vector memory"
    assert not fits_tpu_kernel(q.astype(jnp.bfloat16), pages, reading)
    assert not fits_tpu_kernel(q, pages, replace(reading, rank=64, expand=lambda rows, _: (rows, rows)))
    assert not fits_tpu_kernel(q, pages, replace(reading, expand=lambda rows, _: (rows, rows)))
    assert not fits_tpu_kernel(q, pages._replace(table=np.zeros((64, 4096), np.int32)), reading)
    codes = empty_pool((2, 9, 16, 128), SCHEMES["int8"])
    assert not fits_tpu_kernel(q, pages._replace(k=codes, v=codes), reading)

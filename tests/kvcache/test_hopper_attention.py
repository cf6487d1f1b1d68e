"""Attention of several queries on Hopper GPUs: the kernel in Mosaic's interpreter on a CPU, beside the
reference, with unseen keys and values that are not numbers."""

from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases.gpus import traced_for
from cases.paged_attention import Case, inputs, real, reference, small_pages
from cases.targets import found_target
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from suite.marks import full_if

from duetto.kvcache.kernels import attention, hopper_attention
from duetto.kvcache.kernels.hopper_attention import HOPPER_PREFILL
from duetto.kvcache.kernels.sharded_attention import attend_heads, attend_on_devices
from duetto.kvcache.kernels.tiles import LayerPages
from duetto.kvcache.quantised import choose_cache_format, empty_pool
from duetto.model.attention import AttentionParams
from duetto.model.gpus import disable_kernels
from duetto.model.sharding import KV_AXIS, KV_GROUP_AXIS
from duetto.serve.planner.roofline.targets import target_lowering

INTERPRETER = "jax._src.pallas.mosaic_gpu.interpret"  # not public in all versions
CASES = {
    "behind others": Case((382, 0), (20, 24), T=24, K=1, G=4, W=64, M=7, dtype=jnp.bfloat16),
    "window and sinks": Case(
        (170, 5), (30, 1), T=30, K=1, G=3, H=256, W=16, M=13, dtype=jnp.bfloat16, window=60, sinks=True
    ),
    "chunked": Case(
        (170, 30), (30, 4), T=30, K=1, G=3, H=128, W=64, M=4, dtype=jnp.bfloat16, window=64, chunked=True
    ),
    "several blocks, wide heads": Case(
        (90, 0, 7), (70, 0, 9), T=70, K=2, G=2, H=192, W=128, M=2, dtype=jnp.float16
    ),
}


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Run the kernel with a detector of races. The interpreter knows no layouts, and no product with a
    transposed operand or with sums that are given."""
    gpu, plain = hopper_attention.import_mosaic(), jax.lax.broadcasted_iota
    params, callbacks = (import_module(f"{INTERPRETER}.{name}") for name in ("params", "gpu_callbacks"))
    monkeypatch.setattr(gpu, "layout_cast", lambda x, _: x)
    monkeypatch.setattr(gpu, "broadcasted_iota", lambda *given, layout: plain(*given))
    monkeypatch.setattr(hopper_attention, "multiply_queries", lambda q, k: dot(read(q), read(k).T))
    monkeypatch.setattr(hopper_attention, "add_weighted_values", lambda sums, p, v: sums + dot(p, read(v)))

    def attend(q: Any, pages: LayerPages, reading: AttentionParams) -> np.ndarray:
        with params.force_gpu_interpret_mode(params.InterpretGPUParams(detect_races=True)):
            q, pages = jax.device_put((q, pages))
            found = np.asarray(
                attend_on_devices(hopper_attention.attend_chunk_hopper, q, pages, reading, False)
            )
        assert not callbacks.get_races().races_found
        return found

    yield attend
    cast(Any, attend_heads).clear_cache()


def read(ref: Any) -> Any:
    """Shared memory as `wgmma` would read it: not as plain loads, behind which a copy needs a fence."""
    found = ref[...]
    hopper_attention.import_mosaic().commit_smem()
    return found


def dot(x: Any, y: Any) -> Any:
    return jnp.dot(x, y, preferred_element_type=jnp.float32)


@full_if(lambda name: name != "behind others")
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_equals_the_reference(interpreted: Any, name: str):
    case = CASES[name]
    q, pages, reading = inputs(case)
    found, expected = interpreted(q, pages, reading), reference(q, pages, reading)
    assert np.isfinite(np.asarray(found, np.float32)).all()
    np.testing.assert_allclose(real(found, case.count), real(expected, case.count), atol=2e-2, rtol=2e-2)


@pytest.mark.full
def test_bits_follow_from_the_row_alone(interpreted: Any):
    """In other pages, behind a wider table, alone, and in chunks that begin elsewhere."""
    case = replace(CASES["behind others"], start=(375, 0))
    q, pages, reading = inputs(case)
    found = interpreted(q, pages, reading)
    np.testing.assert_array_equal(
        real(interpreted(q, small_pages(pages, 16), reading), case.count), real(found, case.count)
    )
    rest = pages._replace(
        table=pages.table[:1], start=np.asarray([382], np.int32), count=np.asarray([13], np.int32)
    )
    np.testing.assert_array_equal(interpreted(q[:1, 7:20], rest, reading)[0], found[0, 7:20])


@pytest.mark.full
def test_heads_alone_and_together_have_the_same_bits(interpreted: Any):
    """Many tokens of one query head fill a block; of few tokens all query heads of a key head do."""
    q, pages, reading = inputs(Case((40,), (128,), T=128, K=1, G=2, W=64, M=3, dtype=jnp.bfloat16))
    found = interpreted(q, pages, reading)
    np.testing.assert_allclose(
        real(found, [128]), real(reference(q, pages, reading), [128]), atol=2e-2, rtol=2e-2
    )
    rest = pages._replace(start=np.asarray([140], np.int32), count=np.asarray([28], np.int32))
    np.testing.assert_array_equal(interpreted(q[:, 100:], rest, reading), found[:, 100:])


@pytest.mark.extras
@pytest.mark.as_served
def test_a_group_of_a_mesh_is_no_warp_group(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Axes of meshes have names of their own: one warp group copies, whatever device it is of."""
    target = found_target("4xh200")
    mesh = Mesh(np.array(target.devices).reshape(2, 2), (KV_AXIS, KV_GROUP_AXIS))

    def shaped(*shape: int, dtype: Any = jnp.bfloat16, split: Any = None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(split)))

    pool, rows = shaped(2, 64, 64, 128, split=KV_AXIS), shaped(1, dtype=jnp.int32)
    pages = LayerPages(pool, pool, shaped(1, 8, dtype=jnp.int32), rows, rows)
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    with target_lowering(target):
        attend = jax.jit(lambda q, pages: attention.attend_gpu(q, pages, AttentionParams(0.1)))
        attend.lower(shaped(1, 256, 8, 128), pages).compile()
    program = capfd.readouterr().out
    assert program.count("setmaxnreg.dec") == 1 and program.count("expect_tx") > 2


def test_where_it_attends():
    q = jax.ShapeDtypeStruct((1, 8, 8, 128), jnp.dtype("bfloat16"))
    pool = jax.ShapeDtypeStruct((2, 9, 64, 128), q.dtype)
    pages, reading = LayerPages(pool, pool, None, None, None), AttentionParams(1.0)

    def chosen(q: Any = q, pages: LayerPages = pages, reading: AttentionParams = reading) -> bool:
        return attention.choose_attend(q, pages, reading, False) is hopper_attention.attend_chunk_hopper

    with traced_for("h200"):
        assert chosen() and chosen(reading=replace(reading, window=9, chunked=True))
        assert not chosen(jax.ShapeDtypeStruct((1, 1, 8, 128), q.dtype))
        assert not chosen(reading=replace(reading, softcap=5.0))
        assert not chosen(jax.ShapeDtypeStruct(q.shape, jnp.float32))
        kept = jax.eval_shape(lambda: empty_pool(pool.shape, choose_cache_format("int8", q.dtype)))
        assert not chosen(pages=pages._replace(k=kept, v=kept))
        odd = jax.ShapeDtypeStruct((2, 9, 48, 128), q.dtype)
        assert not chosen(pages=pages._replace(k=odd, v=odd))
        assert attention.choose_attend(q, pages, reading, True) is attention.attend_chunk
        with disable_kernels([HOPPER_PREFILL.name]):
            assert not chosen()
        with disable_kernels([attention.TRITON_PREFILL.name]):
            assert chosen() and attention.has_attention_kernel(q, (pool, pool), reading)
    with traced_for("a100"):
        assert not chosen()

"""The GPU's kernels, compiled for GPUs that are absent, read pages where they lie."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from duetto.kvcache.paged_attention import PagedAttend
from duetto.kvcache.pages import Batch, KVCache
from duetto.kvcache.quantised import choose_cache_format, empty_pool
from duetto.model.attention import AttentionParams
from duetto.model.sharding import device_bytes
from duetto.serve.planner.roofline.program_facts import read_program_facts
from duetto.serve.planner.roofline.targets import MissingCompiler, Target, find_target, target_lowering

pytestmark = [pytest.mark.as_served, pytest.mark.extras]


def target_of(name: str) -> Target:
    try:
        return find_target(name)
    except MissingCompiler as error:
        pytest.skip(str(error))


def compiled(
    name: str, T: int, H: int = 128, rank: int | None = None, kept: str = "auto"
) -> tuple[jax.stages.Compiled, int]:
    """One layer's attention over a cache of up to 128 MiB, and the bytes of its pools on a device; latent
    rows have one."""
    target = target_of(name)
    devices = target.devices
    whole, heads, pool = (SingleDeviceSharding(devices[0]),) * 3
    latent, queries = rank is not None, whole
    if len(devices) > 1:
        mesh = Mesh(np.array(devices), ("tensor",))
        specs = (), (None, None, "tensor"), ("tensor",)
        whole, queries, pool = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)
        heads, pool = (whole, whole) if latent else (queries, pool)

    def shape(where: Any, *sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=where)

    B, N, K, P, W = 4, 16, 8 if rank is None else 1, 512, 64
    ints = partial(shape, whole, dtype=jnp.int32)
    batch = Batch(ints(B, T), ints(B), ints(B), (ints(B, 64),), ints(B))
    empty = jax.eval_shape(lambda: empty_pool((K, P, W, H), choose_cache_format(kept, jnp.bfloat16)))
    keys = jax.tree.map(lambda x: shape(pool, *x.shape, dtype=x.dtype), empty)
    new = shape(heads, B, T, K, H)
    reading = AttentionParams(H**-0.5)
    if latent:
        reading = AttentionParams(H**-0.5, expand=lambda rows, _: (rows, rows[..., :rank]), rank=rank)

    def attend(cache: KVCache, batch: Batch, q: Any, k: Any, v: Any) -> Any:
        return PagedAttend(batch, (None,))(cache, 0, q, k, v, reading)

    place = jax.tree.map(lambda x: x.sharding, keys)
    places = KVCache((place,), (None if latent else place,))
    jitted = jax.jit(attend, donate_argnums=0, out_shardings=(places, queries))
    cache = KVCache((keys,), (None if latent else keys,))
    arguments = cache, batch, shape(queries, B, T, N, H), new, None if latent else new
    with target_lowering(target):
        return jitted.lower(*arguments).compile(), device_bytes(cache)


@pytest.mark.parametrize("name", ["h200", "2xh200"])
@pytest.mark.parametrize(
    "T, H, rank, kept, kernels",
    [
        (1, 128, None, "auto", 2),
        (256, 128, None, "auto", 1),
        (1, 96, None, "auto", 2),
        (256, 80, None, "auto", 1),
        (1, 576, 512, "auto", 2),
        (256, 576, 512, "auto", 1),
        (1, 128, None, "int8", 2),
        (256, 128, None, "int8", 1),
        (1, 128, None, "fp8_e4m3", 2),
        (256, 80, None, "fp8_e5m2", 1),
        (1, 576, 512, "fp8_e4m3", 2),
    ],
)
def test_a_gpu_reads_pages_in_place(name: str, T: int, H: int, rank: int | None, kept: str, kernels: int):
    program, pools = compiled(name, T, H, rank, kept)
    found, text = read_program_facts(program), program.as_text() or ""
    assert len(re.findall(r'custom_call_target="(?:__gpu\$xla\.gpu\.triton|mosaic_gpu)', text)) == kernels
    assert found.aliased == pools
    assert found.temporaries < pools / 8
    assert found.moved == () and found.collectives == {}
    assert " while(" not in text

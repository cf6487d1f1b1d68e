"""The GPU's kernels, compiled for GPUs that are absent, read pages where they lie."""

import re
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from duetto.kvcache.pages import Batch, KVCache, paged
from duetto.model.attention import Reading
from duetto.serve.roofline.facts import facts
from duetto.serve.roofline.targets import MissingCompiler, Target, described, find_target

pytestmark = [pytest.mark.as_served, pytest.mark.extras]


def target_of(name: str) -> Target:
    try:
        return find_target(name)
    except MissingCompiler as error:
        pytest.skip(str(error))


def compiled(name: str, T: int) -> tuple[jax.stages.Compiled, int]:
    """One layer's attention over a cache of 128 MiB, and the bytes of its pool of keys on a device."""
    target = target_of(name)
    devices = target.devices
    whole, heads, pool = (SingleDeviceSharding(devices[0]),) * 3
    if len(devices) > 1:
        mesh = Mesh(np.array(devices), ("tensor",))
        specs = (), (None, None, "tensor"), ("tensor",)
        whole, heads, pool = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)

    def shape(where: Any, *sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=where)

    B, N, K, H, P, W = 4, 16, 8, 128, 512, 64
    ints = partial(shape, whole, dtype=jnp.int32)
    batch = Batch(ints(B, T), ints(B), ints(B), (ints(B, 64),), ints(B))
    keys = shape(pool, K, P, W, H)
    new = shape(heads, B, T, K, H)

    def attend(cache: KVCache, batch: Batch, q: Any, k: Any, v: Any) -> Any:
        return paged(batch, (None,))(cache, 0, q, k, v, Reading(H**-0.5))

    jitted = jax.jit(attend, donate_argnums=0, out_shardings=(KVCache((pool,), (pool,)), heads))
    arguments = KVCache((keys,), (keys,)), batch, shape(heads, B, T, N, H), new, new
    with warnings.catch_warnings(), described(target):
        # jax stores what it compiled for an absent device, and cannot read it back
        warnings.filterwarnings("ignore", "Error (reading|writing) persistent compilation cache")
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated")
        return jitted.lower(*arguments).compile(), K * P * W * H * 2 // len(devices)


@pytest.mark.parametrize("name", ["h200", "2xh200"])
@pytest.mark.parametrize("T, kernels", [(1, 2), (256, 1)])
def test_a_gpu_reads_pages_in_place(name: str, T: int, kernels: int):
    program, pool = compiled(name, T)
    found, text = facts(program), program.as_text() or ""
    assert len(re.findall(r'custom_call_target="__gpu\$xla\.gpu\.triton"', text)) == kernels
    assert found.aliased == 2 * pool
    assert found.temporaries < pool / 4
    assert found.moved == () and found.collectives == {}
    assert " while(" not in text

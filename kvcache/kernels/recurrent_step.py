"""Single-token step of a recurrent memory in place, on NVIDIA GPUs. A Pallas kernel (Triton backend) reads a
state's page and writes its new page once each.

XLA would read or write the states of all rows eight times: it gathers them, and reads them for each sum.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import triton
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from ...model.gpus import Kernel, may_use_kernel
from ...model.recurrent.linear import Terms
from ...model.sharding import automatic_axes, is_manual_shard, named_shardings, sharded_axes

MEMORY_SIZES = (16, 32, 64, 128, 256)  # of keys and values
MAX_BLOCK_NUMBERS = 8192  # numbers of a memory that a block of threads holds
STEP_KERNEL = Kernel("recurrent_step", "triton", "XLA passes over the states")

MemoryPool = Float[Array, "N P H U"]


class StatePages(NamedTuple):
    """Pages of the rows' states.

    source: page of the state before the token; negative if there is none
    target: page of the state after the token; past the pool if it is not written
    """

    source: Int[Array, " B"]
    target: Int[Array, " B"]


def can_step_in_place(pool: MemoryPool) -> bool:
    """True if the kernel can step this memory in place on its devices."""
    is_supported_mesh = not is_manual_shard(pool) or not automatic_axes(jax.typeof(pool).sharding.mesh)
    return is_supported_mesh and set(pool.shape[2:]) <= set(MEMORY_SIZES) and may_use_kernel(STEP_KERNEL)


def step_pages(
    pool: MemoryPool, pages: StatePages, x: Terms, interpret: bool = False
) -> tuple[MemoryPool, Float[Array, "B N U"]]:
    """Step the memory of each row by one token. Its terms come from `exponentiate_decay`. Returns the pool
    and the token's outputs."""
    terms = Terms(x.q, x.k, x.v, x.decay, x.rate)
    pool, out = (step_local_heads if is_manual_shard(pool) else step_on_mesh)(pool, pages, terms, interpret)
    return pool, out if x.skip is None else out + x.skip


def step_local_heads(pool: MemoryPool, pages: StatePages, x: Terms, interpret: bool) -> tuple[Any, Any]:
    """Step the memory of the heads on one device."""
    N, _, H, U = pool.shape
    B, width = len(pages.source), min(U, max(MAX_BLOCK_NUMBERS // H, 16))
    return pl.pallas_call(
        partial(step_kernel, width=width),
        grid=(U // width, N, B),
        out_shape=(
            jax.ShapeDtypeStruct(pool.shape, pool.dtype),
            jax.ShapeDtypeStruct((B, N, U), jnp.float32),
        ),
        input_output_aliases={0: 0},
        cost_estimate=pl.CostEstimate(
            flops=7 * B * N * H * U, transcendentals=0, bytes_accessed=2 * 4 * B * N * H * U
        ),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="step_memory",
    )(pool, pages, x)


def step_kernel(pool: Any, pages: StatePages, x: Terms, new: Any, out: Any, *, width: int):
    """Step some values of one head of a row (kernel body)."""
    part, head, row = (pl.program_id(axis) for axis in range(3))
    values, source, target = pl.ds(part * width, width), pages.source[row], pages.target[row]
    k, v = x.k[row, head, :], x.v[row, head, values]
    remains = x.decay[row, head, :][:, None] if len(x.decay.shape) == 3 else x.decay[row, head]
    memory = pool[head, jnp.maximum(source, 0), :, values]
    memory = jnp.where(source >= 0, memory * remains, 0.0)
    change = v if x.rate is None else x.rate[row, head] * (v - jnp.sum(memory * k[:, None], axis=0))
    memory = memory + k[:, None] * change[None]
    out[row, head, values] = jnp.sum(memory * x.q[row, head, :][:, None], axis=0)

    @pl.when(target < pool.shape[1])
    def _() -> None:
        new[head, target, :, values] = memory


def partition_step(interpret: bool, mesh: Any, shapes: Any, result: Any) -> Any:
    """Tell XLA's partitioner how to run the step: every device of the mesh has some heads of the pool."""
    pool, pages, x = shapes
    heads = sharded_axes(pool, 0) or None
    replicated_spec, pools, rows = PartitionSpec(), PartitionSpec(heads), PartitionSpec(None, heads)
    specs = pools, jax.tree.map(lambda _: replicated_spec, pages), jax.tree.map(lambda _: rows, x)
    return (
        mesh,
        partial(step_local_heads, interpret=interpret),
        named_shardings(mesh, (pools, rows)),
        named_shardings(mesh, specs),
    )


def step_sharding_rule(interpret: bool, mesh: Any, values: Any, results: Any) -> str:
    """Return the sharding rule of the step for XLA's partitioner."""
    terms = ["b n h" if value.rank == 3 else "b n" for value in values[6:]]
    return ", ".join(["n p h u", "b", "b", "b n h", "b n h", "b n u", *terms]) + " -> n p h u, b n u"


partitioned_step = custom_partitioning(step_local_heads, static_argnums=(3,))
partitioned_step.def_partition(partition_step, sharding_rule=step_sharding_rule)
step_on_mesh = jax.jit(partitioned_step, static_argnums=(3,))  # layers share one trace

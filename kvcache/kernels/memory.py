"""Single-token step of a recurrent memory in place, on NVIDIA GPUs: a Pallas kernel (Triton backend) that
reads a state's page and writes its new page once each.

XLA would pass over the states of all rows eight times: it gathers them, and reads them for each sum.
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

from ...model.gpus import Kernel, may_use
from ...model.recurrent.linear import Terms
from ...model.sharding import automatic_axes, axes_of, in_shards, placed

SIZES = (16, 32, 64, 128, 256)  # of keys and values
MOST = 8192  # numbers of a memory that a block of threads holds at once
STEP = Kernel("recurrent_step", "triton", "XLA passes over the states")

MemoryPool = Float[Array, "N P H U"]


class StatePages(NamedTuple):
    """Pages of the rows: of the state before the token, negative where there is none, and of that after it,
    beyond the pool where none is kept."""

    source: Int[Array, " B"]
    target: Int[Array, " B"]


def steps_in_place(pool: MemoryPool) -> bool:
    """True if the kernel steps this memory on its devices."""
    here = not in_shards(pool) or not automatic_axes(jax.typeof(pool).sharding.mesh)
    return here and set(pool.shape[2:]) <= set(SIZES) and may_use(STEP)


def step_pages(
    pool: MemoryPool, place: StatePages, x: Terms, interpret: bool = False
) -> tuple[MemoryPool, Float[Array, "B N U"]]:
    """The pool after one token of each row, whose terms are `faded`, and the token's output."""
    own = Terms(x.q, x.k, x.v, x.decay, x.rate)
    pool, out = (local if in_shards(pool) else whole)(pool, place, own, interpret)
    return pool, out if x.skip is None else out + x.skip


def local(pool: MemoryPool, place: StatePages, x: Terms, interpret: bool) -> tuple[Any, Any]:
    """The step for the heads of one device."""
    N, _, H, U = pool.shape
    B, width = len(place.source), min(U, max(MOST // H, 16))
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
    )(pool, place, x)


def step_kernel(pool: Any, place: StatePages, x: Terms, new: Any, out: Any, *, width: int):
    """Some values of a head of a row."""
    part, head, row = (pl.program_id(axis) for axis in range(3))
    values, source, target = pl.ds(part * width, width), place.source[row], place.target[row]
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


def on_each_device(interpret: bool, mesh: Any, shapes: Any, result: Any) -> Any:
    """Every device of a mesh has some heads of the pool."""
    pool, place, x = shapes
    heads = axes_of(pool, 0) or None
    all_of_it, pools, rows = PartitionSpec(), PartitionSpec(heads), PartitionSpec(None, heads)
    specs = pools, jax.tree.map(lambda _: all_of_it, place), jax.tree.map(lambda _: rows, x)
    return mesh, partial(local, interpret=interpret), placed(mesh, (pools, rows)), placed(mesh, specs)


def axes(interpret: bool, mesh: Any, values: Any, results: Any) -> str:
    """The sharding rule for XLA's partitioner."""
    terms = ["b n h" if value.rank == 3 else "b n" for value in values[6:]]
    return ", ".join(["n p h u", "b", "b", "b n h", "b n h", "b n u", *terms]) + " -> n p h u, b n u"


partitioned = custom_partitioning(local, static_argnums=(3,))
partitioned.def_partition(on_each_device, sharding_rule=axes)
whole = jax.jit(partitioned, static_argnums=(3,))  # layers share one trace

"""Products of consecutive rows with one expert's matrix each (grouped matmul), on NVIDIA GPUs.

Our own kernel computes them (`expert_tiles.py`). If it is refused, a Hopper GPU has the kernel that jax ships
(Pallas, Mosaic GPU backend). It reads all experts' weights, also those without rows. It multiplies blocks of
`GROUPED_BLOCK_ROWS` rows by one expert's matrix and keeps the rows of that expert. Two experts that share a
block multiply it one after the other. Blocks have one size and a row's sum runs over K in order. So its bits
depend neither on the other rows nor on the number of an expert's rows.

The module is in jax 0.10 to 0.12. Without it, and on other devices, `mixture.py` uses another method.
`choose_expert_kernel` chooses.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..gpus import Kernel, import_jax_kernel, may_use_kernel
from .expert_tiles import can_tile_experts, multiply_expert_arrays

GROUPED_BLOCK_ROWS = 64  # rows of a block, as of the tensor cores' instruction
GROUPED_STEP_INNER = 64  # numbers of K in a step of a block's sum
GROUPED_BLOCK_COLUMNS = (128, 192, 64)  # columns of a block: the first that divides a matrix's
GROUPED_STAGES = 4  # steps that are loaded ahead
GROUPED_KERNEL = Kernel("expert_product", "mosaic", "each tile of rows copies an expert")


def choose_expert_kernel(dtype: Any, *shapes: tuple[int, ...]) -> Callable[..., Any] | None:
    """Return the kernel for rows of this dtype and experts' matrices [E,D,F] of these shapes, or None."""
    if can_tile_experts(dtype, *shapes):
        return multiply_expert_arrays
    return grouped_product if can_multiply_grouped(dtype, *shapes) else None


def ragged_dot_module() -> Any:
    """Return the module of jax's kernel, or None."""
    return import_jax_kernel("ragged_dot_mgpu")


def can_multiply_grouped(dtype: Any, *shapes: tuple[int, ...]) -> bool:
    """Return True if jax's kernel multiplies rows by experts' matrices [E,D,F] of these shapes and this
    dtype."""
    return (
        ragged_dot_module() is not None
        and may_use_kernel(GROUPED_KERNEL)
        and dtype in (jnp.bfloat16, jnp.float16)
        and all(D % GROUPED_STEP_INNER == 0 and grouped_block_columns(F) is not None for _, D, F in shapes)
    )


def grouped_block_columns(F: int) -> int | None:
    """Return the number of columns of a block for a matrix with F columns, or None."""
    return next((n for n in GROUPED_BLOCK_COLUMNS if F % n == 0), None)


@jax.jit  # layers share one trace
def grouped_product(
    rows: Float[Array, "rows D"], w: Float[Array, "E D F"], sizes: Int[Array, " E"]
) -> Float[Array, "rows F"]:
    """Multiply consecutive rows by one expert's matrix each. Expert e owns the next sizes[e] rows.

    Products of rows without an expert are undefined.
    """
    filled = jnp.pad(rows, ((0, -rows.shape[0] % GROUPED_BLOCK_ROWS), (0, 0)))
    out = ragged_dot_module().ragged_dot(
        filled,
        w,
        group_sizes=sizes,
        block_m=GROUPED_BLOCK_ROWS,
        block_n=grouped_block_columns(w.shape[2]),
        block_k=GROUPED_STEP_INNER,
        max_concurrent_steps=GROUPED_STAGES,
        grid_block_n=1,
    )
    return out[: rows.shape[0]]

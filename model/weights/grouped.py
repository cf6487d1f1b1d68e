"""Products of consecutive rows with one expert's matrix each, on NVIDIA GPUs.

They are our own kernel's (`expert_tiles.py`). Where it is refused, a GPU of the Hopper generation has the one
that jax ships (Pallas, Mosaic GPU backend), which reads all experts' weights, those without rows included. It
multiplies blocks of ROWS rows with one expert's matrix and keeps the rows that are that expert's: two
experts that share a block multiply it one after the other. Blocks have one size and a row's sum runs over
K in order, so its bits depend neither on the rows beside it nor on how many an expert has.

The module is there in jax 0.10 to 0.12; where it is not, and on other devices, `experts.py` goes another
way. `expert_kernel` chooses.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..gpus import Kernel, may_use, shipped
from .expert_tiles import can_tile, tiled_product

ROWS = 64  # of a block: those of the tensor cores' instruction
INNER = 64  # of K in a step of a block's sum
COLUMNS = (128, 192, 64)  # of a block, the first that divides a matrix's
STAGES = 4  # steps that are loaded ahead
GROUPED = Kernel("expert_product", "mosaic", "each tile of rows copies an expert")


def expert_kernel(dtype: Any, *shapes: tuple[int, ...]) -> Callable[..., Any] | None:
    """The kernel for rows of this dtype and experts' matrices [E,D,F] of these shapes, or None."""
    if can_tile(dtype, *shapes):
        return tiled_product
    return grouped_product if can_multiply(dtype, *shapes) else None


def kernel() -> Any:
    """The module of jax's kernel, or None where there is none."""
    return shipped("ragged_dot_mgpu")


def can_multiply(dtype: Any, *shapes: tuple[int, ...]) -> bool:
    """True if jax's kernel multiplies rows with experts' matrices [E,D,F] of these shapes and this dtype."""
    return (
        kernel() is not None
        and may_use(GROUPED)
        and dtype in (jnp.bfloat16, jnp.float16)
        and all(D % INNER == 0 and columns(F) is not None for _, D, F in shapes)
    )


def columns(F: int) -> int | None:
    """Columns of a block of a matrix with F of them, or None."""
    return next((n for n in COLUMNS if F % n == 0), None)


@jax.jit  # layers share one trace
def grouped_product(
    rows: Float[Array, "rows D"], w: Float[Array, "E D F"], sizes: Int[Array, " E"]
) -> Float[Array, "rows F"]:
    """Products of consecutive rows with one expert's matrix each: expert e owns the next sizes[e] rows. Rows
    that none owns have no meaning."""
    filled = jnp.pad(rows, ((0, -rows.shape[0] % ROWS), (0, 0)))
    out = kernel().ragged_dot(
        filled,
        w,
        group_sizes=sizes,
        block_m=ROWS,
        block_n=columns(w.shape[2]),
        block_k=INNER,
        max_concurrent_steps=STAGES,
        grid_block_n=1,
    )
    return out[: rows.shape[0]]

"""Products of consecutive rows with one expert's matrix each on NVIDIA GPUs. Experts without rows are not
read (Pallas, Triton backend).

Rows are cut into tiles of one expert (as MegaBlocks does, Gale et al., arXiv 2211.15841). A block of threads
multiplies a tile by some columns of its expert's matrix, which it reads in place: numbers, or codes of eight
or four bits that are widened inside. A number is one sum in the order of the inner dimension, and does not
depend on the other rows. Rows may be codes too, whose sums with integers are exact.
"""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from ..gpus import Kernel, refusal_reason, target_gpu
from .nibbles import NibbleFormat, dequantise_codes, scales_to_float32

EXPERT_TILE_ROWS = 16, 32, 64  # rows of a tile
EXPERT_BLOCK_COLUMNS = 128, 64  # columns of a block: the first that divides a matrix's
EXPERT_STEP_INNER = 64  # numbers of a row that a step multiplies
EXACT_STEPS = (1 << 24) // (127 * 128 * EXPERT_STEP_INNER)  # steps whose sums of int8 products float32 holds
MAJORS_OF_64_ROWS = (10,)  # major capabilities whose instructions take 64 rows: so do all tiles
EXPERT_TILES_KERNEL = Kernel(
    "expert_tiles", "triton", "experts without tokens are read, or each tile copies one"
)
EXPERTS_PER_TOKEN = 8  # experts of a token, for an estimate


class ExpertMatrices(NamedTuple):
    """Matrices of E experts.

    values: numbers [E,D,F] of the rows' dtype, or codes. A byte of 4-bit codes holds two neighbours along D.
    scales: scales of the codes, [E,groups,blocks], or None.
    zeros: zeros of 4-bit codes in the scales' shape. None: 8.
    """

    values: Any
    scales: Any = None
    zeros: Any = None


class ExpertTiles(NamedTuple):
    """Expert and range of rows of each tile. The range is empty for tiles after the last.

    expert: number of the expert.
    first: number of the first row.
    last: number of the row after the last.
    """

    expert: Int[Array, " tiles"]
    first: Int[Array, " tiles"]
    last: Int[Array, " tiles"]


def expert_block_columns(F: int) -> int | None:
    """Return the number of columns of a block for matrices with F columns, or None."""
    return next((n for n in EXPERT_BLOCK_COLUMNS if F % n == 0), None)


def can_tile_experts(dtype: Any, *shapes: tuple[int, ...]) -> bool:
    """Return True if the kernel multiplies rows of this dtype by matrices [E,D,F] of these shapes."""
    return (
        dtype in (jnp.bfloat16, jnp.float16)
        and all(D % EXPERT_STEP_INNER == 0 and expert_block_columns(F) is not None for _, D, F in shapes)
        and refusal_reason(EXPERT_TILES_KERNEL) is None
    )


def can_dequantise_experts(
    matrices: ExpertMatrices,
    nibble_format: NibbleFormat | None,
    shape: tuple[int, ...],
    packed: int,
    dtype: Any,
) -> bool:
    """Return True if the kernel multiplies codes that stand for matrices of this shape.

    Scales must be of outputs or of groups of inputs. Scales of 8-bit codes may be of blocks of outputs too.
    """
    scales = matrices.scales.shape
    if len(shape) != 3 or len(scales) != 3 or scales[0] != shape[0] or not can_tile_experts(dtype, shape):
        return False
    (_, D, F), (_, groups, blocks) = shape, scales
    group, width = D // groups, expert_block_columns(F)
    if nibble_format is not None:
        return (
            packed % 3 == 1
            and blocks == F
            and (group % EXPERT_STEP_INNER == 0 or (group > 1 and EXPERT_STEP_INNER % group == 0))
        )
    by_blocks = blocks == F or F // blocks % (width or F) == 0
    converts = refusal_reason(EXPERT_TILES_KERNEL, converted_dtypes=[matrices.values.dtype]) is None
    return matrices.zeros is None and group % EXPERT_STEP_INNER == 0 and by_blocks and converts


def expert_tile_rows(rows: int, experts: int) -> int:
    """Return the number of a tile's rows: twice an expert's average if an instruction takes 16 rows."""
    device = target_gpu()
    if device is None or device.capability[0] in MAJORS_OF_64_ROWS:
        return EXPERT_TILE_ROWS[-1]
    return next((n for n in EXPERT_TILE_ROWS if n * experts >= 2 * rows), EXPERT_TILE_ROWS[-1])


def cut_expert_tiles(sizes: Int[Array, " E"], rows: int, height: int) -> ExpertTiles:
    """Cut the rows into tiles of `height` rows of one expert. Expert e owns the next sizes[e] of all rows."""
    E, max_tiles = len(sizes), rows // height + min(len(sizes), rows)
    tiles = (sizes + height - 1) // height
    ends, after = jnp.cumsum(jnp.stack([tiles, sizes]), axis=1)
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    expert = jnp.sum(ends[None] <= tile[:, None], axis=1, dtype=jnp.int32)
    tile_expert = jnp.minimum(expert, E - 1)
    first = (after - sizes)[tile_expert] + (tile - (ends - tiles)[tile_expert]) * height
    return ExpertTiles(
        tile_expert, first, jnp.where(expert < E, jnp.minimum(after[tile_expert], first + height), 0)
    )


def multiply_expert_arrays(
    rows: Float[Array, "rows D"], w: Float[Array, "E D F"], sizes: Int[Array, " E"]
) -> Float[Array, "rows F"]:
    """Multiply consecutive rows by one expert's matrix of numbers each, as `multiply_experts`."""
    return multiply_experts(rows, ExpertMatrices(w), sizes)


def multiply_experts(
    rows: Float[Array, "rows D"],
    w: ExpertMatrices,
    sizes: Int[Array, " E"],
    nibble_format: NibbleFormat | None = None,
    interpret: bool = False,
    row_scales: Float[Array, "rows 1"] | None = None,
) -> Float[Array, "rows F"]:
    """Multiply consecutive rows by one expert's matrix each. Expert e owns the next sizes[e] rows.

    `nibble_format` is that of 4-bit codes. `row_scales` are those of rows that are codes: they take 8-bit
    codes with scales of outputs. Products of rows without an expert are undefined.
    """
    height = expert_tile_rows(len(rows), len(sizes))
    return multiply_by_tiles(rows, w, sizes, nibble_format, height, interpret, row_scales)


@partial(jax.jit, static_argnums=(3, 4, 5))  # layers share one trace
def multiply_by_tiles(
    rows: Float[Array, "rows D"],
    w: ExpertMatrices,
    sizes: Int[Array, " E"],
    nibble_format: NibbleFormat | None,
    height: int,
    interpret: bool,
    row_scales: Float[Array, "rows 1"] | None = None,
) -> Float[Array, "rows F"]:
    """Run the kernel with tiles of `height` rows."""
    (M, D), F = rows.shape, w.values.shape[2]
    width = expert_block_columns(F)
    assert width is not None
    tiles = cut_expert_tiles(sizes, M, height)
    # so that the last tile's rows exist
    padded, row_scales = jax.tree.map(lambda x: jnp.pad(x, ((0, height), (0, 0))), (rows, row_scales))
    x = [padded.reshape(-1, D // 2, 2)[..., i] for i in range(2)] if nibble_format else [padded]
    if w.scales is not None and w.scales.dtype == jnp.float8_e8m0fnu:
        w = w._replace(scales=jax.lax.bitcast_convert_type(w.scales, jnp.uint8))
    with jax.named_scope(f"bytes_accessed:{expected_bytes(M, w, rows.dtype)}"):  # the planner reads it
        return pl.pallas_call(
            partial(
                expert_tile_kernel,
                height=height,
                width=width,
                nibble_format=nibble_format,
                interpret=interpret,
            ),
            grid=(F // width, len(tiles.expert)),
            out_shape=jax.ShapeDtypeStruct((M, F), rows.dtype),
            compiler_params=triton.CompilerParams(
                num_warps=4, num_stages=3 if height > EXPERT_TILE_ROWS[0] else 4
            ),
            interpret=interpret,
            name="multiply_experts",
        )(tiles, x, row_scales, w)


def expected_bytes(rows: int, w: ExpertMatrices, dtype: Any) -> int:
    """Return the bytes that a product is expected to read and write, if each token chooses
    `EXPERTS_PER_TOKEN` experts evenly.

    Of the matrices only those of experts with rows count.
    """
    E, _, F = w.values.shape
    weights = sum(prod(part.shape) * part.dtype.itemsize for part in jax.tree.leaves(w))
    D = w.values.shape[1] * (1 + (w.values.dtype == jnp.uint8))
    unused = (1 - min(EXPERTS_PER_TOKEN / E, 1)) ** (rows / EXPERTS_PER_TOKEN)
    return round(weights * (1 - unused)) + rows * (D + F) * dtype.itemsize


def expert_tile_kernel(
    tiles: ExpertTiles,
    x: Any,
    row_scales: Any,
    w: ExpertMatrices,
    out: Any,
    *,
    height: int,
    width: int,
    nibble_format: NibbleFormat | None,
    interpret: bool,
):
    """Compute some columns of a tile's products.

    x has one array [rows,D], or for codes in pairs two: its even and its odd numbers. `row_scales` [rows,1]
    are those of x in codes, or None.
    """
    block, tile = pl.program_id(0), pl.program_id(1)
    expert, first, last = (part[tile] for part in tiles)
    rows, columns, step_inner = pl.ds(first, height), pl.ds(block * width, width), EXPERT_STEP_INNER // len(x)
    groups = 0 if w.scales is None or nibble_format is not None else w.scales.shape[1]
    has_eight_bits, has_groups = groups > 0, groups > 1

    def add_step(i: Any, total: Float[Array, "rows F"]) -> Float[Array, "rows F"]:
        codes = w.values[expert, pl.ds(i * step_inner, step_inner), columns]
        operands = [codes.astype(out.dtype)]
        if nibble_format is not None:
            operands = dequantise_pair(w, codes, expert, i, columns, nibble_format, out.dtype, interpret)
        parts = (part[rows, pl.ds(i * step_inner, step_inner)] for part in x)
        products = (
            jnp.dot(*pair, preferred_element_type=jnp.float32) for pair in zip(parts, operands, strict=True)
        )
        if not has_groups:
            return sum(products, total)
        return total + next(products) * step_scale(w, expert, i, block, width)

    @pl.when(first < last)
    def _() -> None:
        steps, nothing = x[0].shape[1] // step_inner, jnp.zeros((height, width), jnp.float32)
        if row_scales is None or w.values.dtype != jnp.int8:
            total = jax.lax.fori_loop(0, steps, add_step, nothing)
        else:
            total = add_exact_steps(steps, add_step, nothing)
        if has_eight_bits and not has_groups:
            total *= step_scale(w, expert, 0, block, width)
        if row_scales is not None:
            total *= row_scales[rows]
        row = (first + jnp.arange(height, dtype=jnp.int32))[:, None]  # interpret mode would clamp a range
        column = (block * width + jnp.arange(width, dtype=jnp.int32))[None]
        mask = jnp.broadcast_to(row < last, total.shape)
        triton.store(out.at[row, column], total.astype(out.dtype), mask=mask)


def add_exact_steps(
    steps: int, add_step: Callable[..., Any], nothing: Float[Array, "rows F"]
) -> Float[Array, "rows F"]:
    """Add up integers by `add_step`: in float32 over steps that it holds exactly, then in int32."""
    together = max(n for n in range(1, EXACT_STEPS + 1) if steps % n == 0)

    def add_part(i: Any, total: Int[Array, "rows F"]) -> Int[Array, "rows F"]:
        part = jax.lax.fori_loop(0, together, lambda j, part: add_step(i * together + j, part), nothing)
        return total + part.astype(jnp.int32)

    parts = jax.lax.fori_loop(0, steps // together, add_part, nothing.astype(jnp.int32))
    return parts.astype(jnp.float32)


def step_scale(w: ExpertMatrices, expert: Any, i: Any, block: Any, width: int) -> Any:
    """Return the scale of a step of 8-bit codes, or one for each column [1,F]."""
    (_, inner, F), (_, groups, blocks) = w.values.shape, w.scales.shape
    group = i * EXPERT_STEP_INNER // (inner // groups)
    if blocks == F:
        return scales_to_float32(w.scales[expert, group, pl.ds(block * width, width)])[None]
    return scales_to_float32(w.scales[expert, group, block * width // (F // blocks)])


def dequantise_pair(
    w: ExpertMatrices,
    codes: Any,
    expert: Any,
    i: Any,
    columns: Any,
    nibble_format: NibbleFormat,
    dtype: Any,
    interpret: bool,
) -> list[Float[Array, "inner F"]]:
    """Widen a step's codes to two matrices: one for x's even numbers, one for the odd ones."""
    group = 2 * w.values.shape[1] // w.scales.shape[1]
    n = max(EXPERT_STEP_INNER // group, 1)

    def spread_groups(part: Any) -> Any:
        entries = part[expert, pl.ds(i * EXPERT_STEP_INNER // group, n), columns]
        return jnp.broadcast_to(entries[:, None], (n, len(codes) // n, entries.shape[1])).reshape(codes.shape)

    zeros = None if w.zeros is None else spread_groups(w.zeros)
    return dequantise_codes(codes, spread_groups(w.scales), zeros, dtype, nibble_format, interpret)

"""Products of int8 codes on NVIDIA GPUs, and the codes of their rows: a kernel each (Pallas, Triton backend).

XLA reads a row three times to quantise it, and writes 32-bit sums that another kernel scales. Here a block of
threads quantises a row, and a product ends with both scales. Matrices that multiply the same rows are one
product. Weights are kept by outputs, since tensor cores take codes only with the inputs side by side.

Sums of codes are exact. So tiles, and the parts of the inner dimension, change no bit.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int, Int8, Num

from ...gpus import Kernel
from ...layers import prevent_fma
from ..input_quantised import RowCodes, widen_rounded
from ..schemes import ACTIVATION_SCHEMES

ROW_CODES_KERNEL = Kernel("int8_codes", "triton", "XLA quantises inputs of products")
CODE_PRODUCT_KERNEL = Kernel("int8_product", "triton", "XLA multiplies codes, and scales sums apart")
CODE_TILE_ROWS = 16, 32, 64, 128  # rows of a tile: the first that has all rows, else the last
# Columns of a tile: the more, the less often rows are read. Inputs of a step: the first that divides.
CODE_TILE_COLUMNS, CODE_STEPS = (128, 64), (128, 64, 32)
SMALL_TILE_ROWS = 64  # rows of a tile for one group of warps
# Blocks that keep the memory of a large GPU busy. Two blocks share as many inputs, if blocks are fewer.
MIN_CODE_BLOCKS, MIN_SPLIT_INPUTS = 96, 8192
MAX_CODED_ROW = 1 << 16  # numbers of a row that one block of threads holds
MAX_PRODUCT_ROWS = 256  # rows up to which the product's kernel is used: XLA tunes products of more rows
NUMBERS_PER_WARP = 1024


RowFunction = Callable[..., Float[Array, "..."]]


class CodeMatrix(NamedTuple):
    """A matrix of int8 codes by outputs.

    values: codes [F,D].
    scales: float32 scales of the outputs, [F], or [1] for all.
    """

    values: Any
    scales: Any


class CodeTiles(NamedTuple):
    """Tiling of a product of codes.

    rows: rows of a tile.
    columns: columns of a tile.
    step: inputs that are multiplied at once.
    parts: number of parts of the inner dimension.
    """

    rows: int
    columns: int
    step: int
    parts: int

    @property
    def compiler_params(self) -> triton.CompilerParams:
        """Return warps and steps in flight, whose operands take at most 96 KiB of shared memory."""
        is_small = self.rows <= SMALL_TILE_ROWS
        return triton.CompilerParams(num_warps=4 if is_small else 8, num_stages=4 if is_small else 3)


class TilePlace(NamedTuple):
    """Place of a tile in a product.

    row: first row.
    block: its columns in the matrix, in tiles.
    out_block: its columns in the array of the product, in tiles.
    part: part of the inner dimension.
    """

    row: Any
    block: Any
    out_block: Any
    part: Any


def choose_code_tiles(rows: int, inner: int, columns: Sequence[int]) -> CodeTiles | None:
    """Return the tiling of a product of rows and matrices of these columns; None if the kernel has none.

    Only the inner dimension of a single matrix is split: XLA adds two parts up in the kernel that reads them,
    and what several matrices make goes to kernels of ours.
    """
    step = next((step for step in CODE_STEPS if inner % step == 0), 0)
    fitting = [size for size in CODE_TILE_COLUMNS if all(n % size == 0 for n in columns)]
    if not step or not fitting:
        return None
    tile_rows = next((size for size in CODE_TILE_ROWS if size >= rows), CODE_TILE_ROWS[-1])
    width = sum(columns) * pl.cdiv(rows, tile_rows)
    tile_columns = next((size for size in fitting if width >= MIN_CODE_BLOCKS * size), fitting[-1])
    is_long = inner >= MIN_SPLIT_INPUTS and inner % (2 * step) == 0
    is_split = is_long and len(columns) == 1 and width < MIN_CODE_BLOCKS * tile_columns
    return CodeTiles(tile_rows, tile_columns, step, 1 + is_split)


@partial(jax.jit, static_argnames=("function", "interpret"))  # layers share one trace
def quantise_rows_by_kernel(
    inputs: tuple[Float[Array, "rows D"], ...], function: RowFunction, interpret: bool = False
) -> RowCodes:
    """Quantise rows of at most `MAX_CODED_ROW` 16-bit numbers to int8, as `quantise_rows`.

    function: makes the rows of arrays, entry by entry. Of zeros it makes 0.
    """
    M, D = inputs[0].shape
    width = pl.next_power_of_2(D)
    values, scales = pl.pallas_call(
        partial(row_codes_kernel, function=function, width=width, interpret=interpret),
        grid=(M,),
        out_shape=[jax.ShapeDtypeStruct((M, D), jnp.int8), jax.ShapeDtypeStruct((M,), jnp.float32)],
        compiler_params=triton.CompilerParams(num_warps=min(max(width // NUMBERS_PER_WARP, 1), 32)),
        interpret=interpret,
        name="quantise_rows",
    )(inputs)
    return RowCodes(values, scales[:, None])


def row_codes_kernel(
    inputs: Sequence[Any], values: Any, scales: Any, *, function: RowFunction, width: int, interpret: bool
):
    """Quantise one row."""
    scheme, row, at = ACTIVATION_SCHEMES["int8"], pl.program_id(0), jnp.arange(width)
    inside = None if width == values.shape[1] else at < values.shape[1]
    other = None if inside is None else 0.0
    x = function(*[triton.load(ref.at[row, at], mask=inside, other=other) for ref in inputs])
    x32 = widen_rounded(x) if interpret else x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(jnp.abs(x32), jnp.int32)  # their order keeps NaN the largest
    largest = jax.lax.bitcast_convert_type(jnp.max(bits), jnp.float32)
    divide, to_int8 = (jnp.divide, round_by_xla) if interpret else (divide_by_assembly, round_by_assembly)
    inverse = divide(scheme.max_code, jnp.broadcast_to(largest, 1))  # instructions take no scalars
    inverse = jnp.where(largest > scheme.min_magnitude, inverse, 0.0)
    triton.store(values.at[row, at], to_int8(x32 * inverse), mask=inside)
    scales[row] = largest * np.float32(1 / scheme.max_code)


def round_by_xla(x: Float[Array, " D"]) -> Int8[Array, " D"]:
    """Round to the nearest integer, halves to even ones."""
    return jnp.round(x).astype(jnp.int8)


def round_by_assembly(x: Float[Array, " D"]) -> Int8[Array, " D"]:
    """Round to the nearest integer, halves to even ones, by an instruction."""
    return run_assembly("cvt.rni.s32.f32 $0, $1;", "=r,f", jnp.int32, x).astype(jnp.int8)


def divide_by_assembly(a: float, b: Float[Array, " D"]) -> Float[Array, " D"]:
    """Divide a number by others. The quotients are correctly rounded, unlike Triton's own."""
    bits = np.float32(a).view(np.uint32)
    return run_assembly(f"div.rn.f32 $0, 0f{bits:08X}, $1;", "=f,f", jnp.float32, b)


def run_assembly(body: str, constraints: str, dtype: Any, *operands: Num[Array, "..."]) -> Num[Array, "..."]:
    """Run an instruction on each entry."""
    out = [jax.ShapeDtypeStruct(operands[0].shape, dtype)]
    return triton.elementwise_inline_asm(
        body, args=operands, constraints=constraints, pack=1, result_shape_dtypes=out
    )[0]


@partial(jax.jit, static_argnames=("dtype", "interpret"))  # layers share one trace
def multiply_by_kernel(
    rows: RowCodes, matrices: tuple[CodeMatrix, ...], dtype: Any, interpret: bool = False
) -> list[Float[Array, "rows _"]]:
    """Multiply int8 rows by matrices that have a tiling.

    Products of equal sizes are arrays of their own, as kernels read them. Others are columns of one array: so
    are queries, keys and values, which stay one.
    """
    (M, D), columns = rows.values.shape, [len(matrix.values) for matrix in matrices]
    tiles = choose_code_tiles(M, D, columns)
    assert tiles is not None
    scales = [jnp.broadcast_to(x.scales.astype(jnp.float32), len(x.values)) for x in matrices]
    out_columns = columns if len({*columns}) == 1 else [sum(columns)]
    out_dtype = jnp.int32 if tiles.parts > 1 else dtype
    products = pl.pallas_call(
        partial(code_product_kernel, tiles=tiles),
        grid=(pl.cdiv(M, tiles.rows), sum(columns) // tiles.columns, tiles.parts),
        out_shape=[jax.ShapeDtypeStruct((tiles.parts, M, size), out_dtype) for size in out_columns],
        compiler_params=tiles.compiler_params,
        interpret=interpret,
        name="multiply_codes",
    )(rows, [matrix.values for matrix in matrices], scales)
    if tiles.parts > 1:
        sums = products[0][0] + products[0][1]
        return [prevent_fma(scale_sums(sums, scales[0], rows.scales)).astype(dtype)]
    if len(products) == len(matrices):
        return [product[0] for product in products]
    return jnp.split(products[0][0], np.cumsum(columns)[:-1], axis=1)


def scale_sums(
    sums: Int[Array, "rows F"], scales: Float[Array, " F"], row_scales: Float[Array, "rows 1"]
) -> Float[Array, "rows F"]:
    """Multiply sums of codes by the scales of their outputs, then of their rows, as `multiply_codes`."""
    return sums.astype(jnp.float32) * scales[None] * row_scales


def code_product_kernel(
    rows: Any, matrices: Sequence[Any], scales: Sequence[Any], *products: Any, tiles: CodeTiles
):
    """Compute one tile of one matrix's product over one part of the inner dimension."""
    row, block, part = (pl.program_id(axis) for axis in range(3))
    first = 0
    for i, (values, own) in enumerate(zip(matrices, scales, strict=True)):
        count, begin = own.shape[0] // tiles.columns, first
        is_apart = len(products) == len(matrices)
        out = products[i if is_apart else 0]
        place = TilePlace(row * tiles.rows, block - begin, block - begin * is_apart, part)
        multiply = partial(multiply_tile, rows, CodeMatrix(values, own), out, place, tiles)
        run_if(len(matrices) > 1, (block >= begin) & (block < begin + count), multiply)
        first += count


def run_if(is_choice: bool, condition: Any, run: Callable[[], None]) -> None:
    """Run a part of a kernel if a condition of the device holds, or without a choice."""
    if is_choice:
        pl.when(condition)(run)
    else:
        run()


def multiply_tile(rows: Any, matrix: CodeMatrix, out: Any, place: TilePlace, tiles: CodeTiles) -> None:
    """Compute a tile."""
    M, D = rows.values.shape
    steps, at = D // (tiles.step * tiles.parts), place.row + jnp.arange(tiles.rows)
    columns = pl.ds(place.block * tiles.columns, tiles.columns)
    known = jnp.minimum(at, M - 1)  # a tile's rows beyond the last are the last again

    def add_step(i: Any, total: Int[Array, "rows F"]) -> Int[Array, "rows F"]:
        inner = (place.part * steps + i) * tiles.step
        x = rows.values[known[:, None], (inner + jnp.arange(tiles.step))[None]]
        w = matrix.values[columns, pl.ds(inner, tiles.step)]
        return total + jnp.dot(x, w.T, preferred_element_type=jnp.int32)

    total = jax.lax.fori_loop(0, steps, add_step, jnp.zeros((tiles.rows, tiles.columns), jnp.int32))
    if tiles.parts == 1:
        total = scale_sums(total, matrix.scales[columns], rows.scales[known, 0][:, None]).astype(out.dtype)
    target = (place.out_block * tiles.columns + jnp.arange(tiles.columns))[None]
    mask = jnp.broadcast_to((at < M)[:, None], total.shape)
    triton.store(out.at[place.part, at[:, None], target], total, mask=mask)

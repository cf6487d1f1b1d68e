"""Products of consecutive rows with one expert's matrix each on NVIDIA GPUs, without the experts that have no
rows (Pallas, Triton backend).

Rows are cut into tiles of one expert (as MegaBlocks does, Gale et al., arXiv 2211.15841); a block of threads
multiplies a tile with some columns of its expert's matrix, which is read where it lies: numbers, or codes of
eight or four bits that are widened inside. A number is one sum in the order of the inner dimension, and a
row's sum knows nothing of the rows beside it.
"""

from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from ..gpus import Kernel, gpu, refusal
from .nibbles import floats, numbers_of

ROWS = 16, 32, 64  # of a tile
COLUMNS = 128, 64  # of a block, the first that divides a matrix's
INNER = 64  # numbers of a row that a step multiplies
BY_64_ROWS = (10,)  # major capabilities whose instructions take 64 rows: all tiles have as many
EXPERTS = Kernel("expert_tiles", "triton", "experts without tokens are read, or each tile copies one")
FOUR_BITS = "int4", "fp4"
CHOICES = 8  # experts of a token, for an estimate


class ExpertMatrices(NamedTuple):
    """Matrices of E experts: numbers of the rows' dtype, or codes [E,D,F] and their scales [E,groups,blocks].
    Codes of four bits lie in pairs along D, with zeros like the scales where they are not 8."""

    values: Any
    scales: Any = None
    zeros: Any = None


class ExpertTiles(NamedTuple):
    """For each tile its expert and its range of rows, which is empty beyond the last."""

    expert: Int[Array, " tiles"]
    first: Int[Array, " tiles"]
    last: Int[Array, " tiles"]


def columns_of(F: int) -> int | None:
    """Columns of a block of matrices with F of them, or None."""
    return next((n for n in COLUMNS if F % n == 0), None)


def can_tile(dtype: Any, *shapes: tuple[int, ...]) -> bool:
    """True if the kernel multiplies rows of this dtype with matrices [E,D,F] of these shapes."""
    return (
        dtype in (jnp.bfloat16, jnp.float16)
        and all(D % INNER == 0 and columns_of(F) is not None for _, D, F in shapes)
        and refusal(EXPERTS) is None
    )


def can_widen(codes: ExpertMatrices, scheme: str, shape: tuple[int, ...], packed: int, dtype: Any) -> bool:
    """True if it multiplies codes of a scheme that stand for such matrices: scales of outputs, or of groups
    of inputs and, of eight bits, of blocks of outputs."""
    scales = codes.scales.shape
    if len(shape) != 3 or len(scales) != 3 or scales[0] != shape[0] or not can_tile(dtype, shape):
        return False
    (_, D, F), (_, groups, blocks) = shape, scales
    group, width = D // groups, columns_of(F)
    if scheme in FOUR_BITS:
        return packed % 3 == 1 and blocks == F and (group % INNER == 0 or (group > 1 and INNER % group == 0))
    by_blocks = blocks == F or F // blocks % (width or F) == 0
    converts = refusal(EXPERTS, kept=[codes.values.dtype]) is None
    return codes.zeros is None and group % INNER == 0 and by_blocks and converts


def rows_of_tile(rows: int, experts: int) -> int:
    """Rows of a tile: twice what an expert has on average, where one instruction multiplies 16 of them."""
    device = gpu()
    if device is None or device.capability[0] in BY_64_ROWS:
        return ROWS[-1]
    return next((n for n in ROWS if n * experts >= 2 * rows), ROWS[-1])


def tiles_of(sizes: Int[Array, " E"], rows: int, height: int) -> ExpertTiles:
    """Tiles of `height` rows of experts that own the next sizes[e] of all rows each."""
    E, most = len(sizes), rows // height + min(len(sizes), rows)
    tiles = (sizes + height - 1) // height
    ends, after = jnp.cumsum(jnp.stack([tiles, sizes]), axis=1)
    tile = jnp.arange(most, dtype=jnp.int32)
    expert = jnp.sum(ends[None] <= tile[:, None], axis=1, dtype=jnp.int32)
    own = jnp.minimum(expert, E - 1)
    first = (after - sizes)[own] + (tile - (ends - tiles)[own]) * height
    return ExpertTiles(own, first, jnp.where(expert < E, jnp.minimum(after[own], first + height), 0))


def tiled_product(
    rows: Float[Array, "rows D"], w: Float[Array, "E D F"], sizes: Int[Array, " E"]
) -> Float[Array, "rows F"]:
    """`multiply` with matrices of numbers."""
    return multiply(rows, ExpertMatrices(w), sizes)


def multiply(
    rows: Float[Array, "rows D"],
    w: ExpertMatrices,
    sizes: Int[Array, " E"],
    scheme: str | None = None,
    interpret: bool = False,
) -> Float[Array, "rows F"]:
    """Products of consecutive rows with one expert's matrix each: expert e owns the next sizes[e] rows. Rows
    that none owns have no meaning."""
    height = rows_of_tile(len(rows), len(sizes))
    return tiled(rows, w, sizes, scheme, height, interpret)


@partial(jax.jit, static_argnums=(3, 4, 5))  # layers share one trace
def tiled(
    rows: Float[Array, "rows D"],
    w: ExpertMatrices,
    sizes: Int[Array, " E"],
    scheme: str | None,
    height: int,
    interpret: bool,
) -> Float[Array, "rows F"]:
    (M, D), F = rows.shape, w.values.shape[2]
    width = columns_of(F)
    assert width is not None
    tiles = tiles_of(sizes, M, height)
    padded = jnp.pad(rows, ((0, height), (0, 0)))  # so that each tile's rows are there
    x = [padded.reshape(-1, D // 2, 2)[..., i] for i in range(2)] if scheme in FOUR_BITS else [padded]
    if w.scales is not None and w.scales.dtype == jnp.float8_e8m0fnu:
        w = w._replace(scales=jax.lax.bitcast_convert_type(w.scales, jnp.uint8))
    with jax.named_scope(f"bytes_accessed:{expected_bytes(M, w, rows.dtype)}"):  # the planner reads it
        return pl.pallas_call(
            partial(kernel, height=height, width=width, scheme=scheme, interpret=interpret),
            grid=(F // width, len(tiles.expert)),
            out_shape=jax.ShapeDtypeStruct((M, F), rows.dtype),
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=3 if height > ROWS[0] else 4),
            interpret=interpret,
            name="multiply_experts",
        )(tiles, x, w)


def expected_bytes(rows: int, w: ExpertMatrices, dtype: Any) -> int:
    """Bytes that rows touch if each CHOICES of them choose different experts, evenly: of matrices those of
    experts with rows."""
    E, _, F = w.values.shape
    weights = sum(prod(part.shape) * part.dtype.itemsize for part in jax.tree.leaves(w))
    D = w.values.shape[1] * (1 + (w.values.dtype == jnp.uint8))
    unused = (1 - min(CHOICES / E, 1)) ** (rows / CHOICES)
    return round(weights * (1 - unused)) + rows * (D + F) * dtype.itemsize


def kernel(
    tiles: ExpertTiles,
    x: Any,
    w: ExpertMatrices,
    out: Any,
    *,
    height: int,
    width: int,
    scheme: str | None,
    interpret: bool,
):
    """Some columns of a tile's products; x is [rows D], or for codes in pairs its even and odd numbers."""
    block, tile = pl.program_id(0), pl.program_id(1)
    expert, first, last = (part[tile] for part in tiles)
    rows, columns, taken = pl.ds(first, height), pl.ds(block * width, width), INNER // len(x)
    has_eight_bits = scheme not in (None, *FOUR_BITS)
    has_groups = has_eight_bits and w.scales.shape[1] > 1

    def step(i: Any, total: Float[Array, "rows F"]) -> Float[Array, "rows F"]:
        codes = w.values[expert, pl.ds(i * taken, taken), columns]
        found = [codes.astype(out.dtype)]
        if scheme in FOUR_BITS:
            found = pair_of(w, codes, expert, i, columns, scheme, out.dtype, interpret)
        parts = (part[rows, pl.ds(i * taken, taken)] for part in x)
        products = (
            jnp.dot(*pair, preferred_element_type=jnp.float32) for pair in zip(parts, found, strict=True)
        )
        if not has_groups:
            return sum(products, total)
        return total + next(products) * scale_of(w, expert, i, block, width)

    @pl.when(first < last)
    def _() -> None:
        steps, nothing = x[0].shape[1] // taken, jnp.zeros((height, width), jnp.float32)
        total = jax.lax.fori_loop(0, steps, step, nothing)
        if has_eight_bits and not has_groups:
            total *= scale_of(w, expert, 0, block, width)
        row = (first + jnp.arange(height, dtype=jnp.int32))[:, None]  # interpreted, a range would be moved
        column = (block * width + jnp.arange(width, dtype=jnp.int32))[None]
        mask = jnp.broadcast_to(row < last, total.shape)
        triton.store(out.at[row, column], total.astype(out.dtype), mask=mask)


def scale_of(w: ExpertMatrices, expert: Any, i: Any, block: Any, width: int) -> Any:
    """The scale of a step of 8-bit codes, or one for each column [1,F]."""
    (_, inner, F), (_, groups, blocks) = w.values.shape, w.scales.shape
    group = i * INNER // (inner // groups)
    if blocks == F:
        return floats(w.scales[expert, group, pl.ds(block * width, width)])[None]
    return floats(w.scales[expert, group, block * width // (F // blocks)])


def pair_of(
    w: ExpertMatrices, codes: Any, expert: Any, i: Any, columns: Any, scheme: str, dtype: Any, interpret: bool
) -> list[Float[Array, "inner F"]]:
    """The numbers of a step that multiply x's even ones, and the odd ones'."""
    group = 2 * w.values.shape[1] // w.scales.shape[1]
    n = max(INNER // group, 1)

    def spread(part: Any) -> Any:
        own = part[expert, pl.ds(i * INNER // group, n), columns]
        return jnp.broadcast_to(own[:, None], (n, len(codes) // n, own.shape[1])).reshape(codes.shape)

    zeros = None if w.zeros is None else spread(w.zeros)
    return numbers_of(codes, spread(w.scales), zeros, dtype, scheme, interpret)

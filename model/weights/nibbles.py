"""Products with 4-bit weights on NVIDIA GPUs. Codes are widened inside the kernel, so that only their bytes
are read (Pallas, Triton backend).

XLA would widen them into memory first: it does not fuse scales of groups into a product. The two codes of a
byte multiply x's even and odd numbers. Instructions for two 16-bit numbers each widen them, as in
FasterTransformer (Kim et al., arXiv 2211.10017); Triton's own take one. Tiles, and the parts of the inner
dimension, follow from the weight alone. So a row's bits do not depend on the number of rows.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import triton
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Num, UInt8

from ..gpus import Kernel
from ..sharding import is_manual_shard, num_splits

NIBBLE_TILE_ROWS = 64  # rows of x in a tile
NIBBLE_STEP_BYTES = 64, 32  # bytes of a column that a step takes: the first that divides the column
NIBBLE_BLOCK_COLUMNS = 64  # columns of a block
# Upper bounds: blocks, two a multiprocessor, and parts of the inner dimension.
MAX_NIBBLE_BLOCKS, MAX_INNER_PARTS = 264, 8
ZERO_CODE = 8  # the code of zero if there are no zeros
NIBBLE_KERNEL = Kernel("int4_product", "triton", "XLA widens weights into memory")
NIBBLE_SCALE_DTYPES = ("bfloat16", "float16", "float32")


class FloatBits(NamedTuple):
    """Bits of a 16-bit dtype.

    kind: its name in PTX.
    large: high byte of the least number whose last bit counts one.
    least: that number.
    one: bits of 1.
    half: bits of 0.5.
    mantissa_bit: position of a mantissa's first bit.
    bias_factor: factor that corrects the exponent's bias of an e2m1 at that position.
    """

    kind: str
    large: int
    least: int
    one: int
    half: int
    mantissa_bit: int
    bias_factor: int


FLOAT16_LAYOUTS = {
    "bfloat16": FloatBits("bf16x2", 0x43, 128, 0x3F80, 0x3F00, 6, 0x7E80),
    "float16": FloatBits("f16x2", 0x64, 1024, 0x3C00, 0x3800, 9, 0x7400),
}
# The numbers of four bytes' low or high codes ($0, $1) of a word of codes ($2), words of two factors ($3, $4)
# and, of int4, what is added to a code as the last bits of a large number ($5, $6). To add -0 keeps signs;
# sums and products are `fma`, since others of two bfloat16 numbers need compute capability 9.0.
INT4_ASSEMBLY = """{{
    .reg .b32 one, none, a, b;
    mov.b32 one, {one}; mov.b32 none, 0x80008000;
    shr.u32 a, $2, {shift}; and.b32 a, a, 0x0f0f0f0f;
    prmt.b32 b, a, {large}, 0x4342; prmt.b32 a, a, {large}, 0x4140;
    fma.rn.{kind} a, a, one, $5; fma.rn.{kind} b, b, one, $6;
    fma.rn.{kind} $0, a, $3, none; fma.rn.{kind} $1, b, $4, none;
}}"""
FP4_ASSEMBLY = """{{
    .reg .b32 lack, none, sign, a, b;
    mov.b32 lack, {lack}; mov.b32 none, 0x80008000;
    prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;
    shl.b32 sign, a, {to_sign}; and.b32 sign, sign, none;
    shl.b32 a, a, {to_size}; and.b32 a, a, {size}; or.b32 a, a, sign;
    shl.b32 sign, b, {to_sign}; and.b32 sign, sign, none;
    shl.b32 b, b, {to_size}; and.b32 b, b, {size}; or.b32 b, b, sign;
    fma.rn.{kind} a, a, lack, none; fma.rn.{kind} b, b, lack, none;
    fma.rn.{kind} $0, a, $3, none; fma.rn.{kind} $1, b, $4, none;
}}"""


class NibbleFormat(NamedTuple):
    """Widening of 4-bit codes inside a kernel.

    assembly: instructions that widen four codes, as `dequantise_by_assembly` formats and calls them.
    widen: computes the same numbers of codes 0..15 and these operands, by arithmetic.
    has_zeros: True if codes are integers around zeros, which are an operand.
    """

    assembly: str
    widen: Callable[..., Float[Array, "inner F"]]
    has_zeros: bool


def unpack_nibbles(pairs: UInt8[Array, "..."], axis: int) -> UInt8[Array, "..."]:
    """Unpack two 4-bit codes from each byte, neighbours along an axis."""
    axis %= pairs.ndim
    codes = jnp.stack([pairs & jnp.uint8(15), pairs >> jnp.uint8(4)], axis + 1)
    return codes.reshape(*pairs.shape[:axis], -1, *pairs.shape[axis + 1 :])


def pack_nibbles(codes: UInt8[Array, "..."], axis: int) -> UInt8[Array, "..."]:
    """Pack codes 0..15, two neighbours along an axis to a byte."""
    axis %= codes.ndim
    even, odd = (jax.lax.slice_in_dim(codes, i, None, 2, axis) for i in range(2))
    return even | (odd << jnp.uint8(4))


def widen_int4_nibbles(
    nibbles: UInt8[Array, "inner F"], factors: Float[Array, "inner F"], added: Float[Array, "inner F"]
) -> Float[Array, "inner F"]:
    """Widen integers: as the last bits of a large number, from which `added` leads back."""
    large = nibbles.astype(jnp.uint16) | jnp.uint16(FLOAT16_LAYOUTS[factors.dtype.name].large << 8)
    return (jax.lax.bitcast_convert_type(large, factors.dtype) + added) * factors


def widen_fp4_nibbles(
    nibbles: UInt8[Array, "inner F"], factors: Float[Array, "inner F"]
) -> Float[Array, "inner F"]:
    """Widen floats e2m1."""
    bits = FLOAT16_LAYOUTS[factors.dtype.name]
    size = (nibbles & jnp.uint8(7)).astype(jnp.uint16)
    normal = (size << jnp.uint16(bits.mantissa_bit)) + jnp.uint16(bits.half)
    magnitude = jnp.where(size < 2, size * jnp.uint16(bits.half), normal)
    sign = (nibbles & jnp.uint8(8)).astype(jnp.uint16) << jnp.uint16(12)
    return jax.lax.bitcast_convert_type(magnitude | sign, factors.dtype) * factors


INT4_NIBBLES = NibbleFormat(INT4_ASSEMBLY, widen_int4_nibbles, has_zeros=True)
FP4_NIBBLES = NibbleFormat(FP4_ASSEMBLY, widen_fp4_nibbles, has_zeros=False)


class NibbleCodes(NamedTuple):
    """A matrix of 4-bit codes.

    values: uint8 [D/2,F], two neighbours of a column in a byte.
    scales: scales of groups, [groups,F].
    zeros: zeros of groups in the scales' shape, or None.
    """

    values: Any  # uint8 [D/2, F]
    scales: Any  # [groups, F]
    zeros: Any  # like scales, or None


class NibbleTiles(NamedTuple):
    """Tiling of a product.

    parts: number of parts of the inner dimension.
    group: bytes of a column that share a scale.
    step: bytes of a column that are multiplied at once.
    """

    parts: int
    group: int
    step: int

    @property
    def label(self) -> str:
        """Return the name by which a compiled program shows the tiling. The planner reads it."""
        return f"tiles_{NIBBLE_TILE_ROWS}x{NIBBLE_BLOCK_COLUMNS}x{2 * self.step}x{self.parts}"


def choose_nibble_tiles(inner: int, columns: int, groups: int) -> NibbleTiles | None:
    """Return the tiling for a weight [inner, columns] with `groups` groups, or None if the kernel cannot
    multiply it."""
    group, step = (
        inner // 2 // groups,
        next((step for step in NIBBLE_STEP_BYTES if inner % (2 * step) == 0), 0),
    )
    if columns % NIBBLE_BLOCK_COLUMNS or not group or not step or (group % step and step % group):
        return None
    blocks, steps = columns // NIBBLE_BLOCK_COLUMNS, inner // (2 * step)
    fitting = (n for n in range(MAX_INNER_PARTS, 1, -1) if steps % n == 0 and n * blocks <= MAX_NIBBLE_BLOCKS)
    return NibbleTiles(next(fitting, 1), group, step)


def has_group_scales(shape: tuple[int, ...], scales: tuple[int, ...], inputs: int) -> bool:
    """Return True if each output has its own scales, for consecutive groups of inputs."""
    split = next((i for i in range(inputs) if scales[i] != shape[i]), inputs)
    return scales[inputs:] == shape[inputs:] and set(scales[split + 1 : inputs]) <= {1}


@partial(jax.jit, static_argnames=("dtype", "interpret"))  # layers share one trace
def multiply_nibbles(
    rows: Float[Array, "rows D"], codes: NibbleCodes, dtype: Any, interpret: bool = False
) -> Float[Array, "rows F"]:
    """Multiply rows by a matrix of codes that has a tiling."""
    padded = jnp.pad(rows, ((0, -len(rows) % NIBBLE_TILE_ROWS), (0, 0)))
    product = multiply_padded_nibbles.fun if is_manual_shard(padded) else multiply_padded_nibbles
    return product(padded, codes, dtype, interpret)[: len(rows)]


@partial(custom_partitioning, static_argnums=(2, 3))
def multiply_padded_nibbles(
    rows: Float[Array, "rows D"], codes: NibbleCodes, dtype: Any, interpret: bool
) -> Float[Array, "rows F"]:
    """Multiply padded rows by codes, or by the part of them that a device holds."""
    (M, D), F = rows.shape, codes.values.shape[1]
    tiles = choose_nibble_tiles(D, F, len(codes.scales))
    if tiles is None:  # a device's part may have no tiling
        return jnp.dot(
            rows, dequantise_nibbles(codes, rows.dtype), preferred_element_type=jnp.float32
        ).astype(dtype)
    even, odd = (rows.reshape(M, D // 2, 2)[..., i] for i in range(2))
    with jax.named_scope(tiles.label):
        sums = pl.pallas_call(
            partial(
                nibble_kernel, tiles=tiles, steps=D // (2 * tiles.step * tiles.parts), interpret=interpret
            ),
            grid=(F // NIBBLE_BLOCK_COLUMNS, M // NIBBLE_TILE_ROWS, tiles.parts),
            out_shape=jax.ShapeDtypeStruct((tiles.parts, M, F), jnp.float32 if tiles.parts > 1 else dtype),
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=4),
            interpret=interpret,
            name="multiply_nibbles",
        )(even, odd, codes)
    return sums[0] if tiles.parts == 1 else sums.sum(0).astype(dtype)


def nibble_kernel(
    even: Any, odd: Any, codes: NibbleCodes, out: Any, *, tiles: NibbleTiles, steps: int, interpret: bool
):
    """Compute the sums of one tile of rows and columns over one part of the inner dimension."""
    columns = pl.ds(pl.program_id(0) * NIBBLE_BLOCK_COLUMNS, NIBBLE_BLOCK_COLUMNS)
    rows, part = pl.ds(pl.program_id(1) * NIBBLE_TILE_ROWS, NIBBLE_TILE_ROWS), pl.program_id(2)

    def add_step(i: Any, total: Float[Array, "rows F"]) -> Float[Array, "rows F"]:
        first = (part * steps + i) * tiles.step
        inner = pl.ds(first, tiles.step)
        pairs = codes.values[inner, columns]
        scales = spread_group_entries(codes.scales, first, columns, tiles)
        zeros = None if codes.zeros is None else spread_group_entries(codes.zeros, first, columns, tiles)
        for x, w in zip(
            (even, odd),
            dequantise_codes(pairs, scales, zeros, even.dtype, INT4_NIBBLES, interpret),
            strict=True,
        ):
            total += jnp.dot(x[rows, inner], w, preferred_element_type=jnp.float32)
        return total

    total = jax.lax.fori_loop(
        0, steps, add_step, jnp.zeros((NIBBLE_TILE_ROWS, NIBBLE_BLOCK_COLUMNS), jnp.float32)
    )
    out[part, rows, columns] = total.astype(out.dtype)


def spread_group_entries(ref: Any, first: Any, columns: Any, tiles: NibbleTiles) -> Any:
    """Return the entries of a step's groups, each repeated for the group's bytes in the step."""
    n = max(tiles.step // tiles.group, 1)
    entries = ref[pl.ds(first // tiles.group, n), columns]
    return jnp.broadcast_to(entries[:, None], (n, tiles.step // n, NIBBLE_BLOCK_COLUMNS)).reshape(
        tiles.step, NIBBLE_BLOCK_COLUMNS
    )


def dequantise_codes(
    codes: UInt8[Array, "inner F"],
    scales: Num[Array, "inner F"],
    zeros: Num[Array, "inner F"] | None,
    dtype: Any,
    nibble_format: NibbleFormat,
    interpret: bool = False,
) -> list[Float[Array, "inner F"]]:
    """Widen codes inside a kernel: the numbers of low codes and of high codes, times their scales.

    Scales of the dtype multiply in 16 bits, and so do powers of two in bfloat16's range: it rounds as often
    as float32.
    """
    are_powers = scales.dtype == jnp.uint8 and dtype == jnp.bfloat16
    in_16_bits = are_powers or scales.dtype == dtype
    scales = scales if scales.dtype == dtype else scales_to_float32(scales)
    factors = scales.astype(dtype) if in_16_bits else jnp.ones(codes.shape, dtype)
    operands = [factors]
    if nibble_format.has_zeros:
        least = FLOAT16_LAYOUTS[dtype.name].least
        operands += [
            jnp.full(codes.shape, -least - ZERO_CODE, dtype)
            if zeros is None
            else -least - zeros.astype(dtype)
        ]
    numbers = [
        (dequantise_by_arithmetic if interpret else dequantise_by_assembly)(
            codes, *operands, nibble_format=nibble_format, shift=shift
        )
        for shift in (0, 4)
    ]
    return (
        numbers if in_16_bits else [(number.astype(jnp.float32) * scales).astype(dtype) for number in numbers]
    )


def dequantise_by_assembly(
    codes: UInt8[Array, "inner F"], *operands: Any, nibble_format: NibbleFormat, shift: int
) -> Float[Array, "inner F"]:
    """Widen the codes that begin at bit `shift`, by instructions that make two numbers each."""
    bits = FLOAT16_LAYOUTS[operands[0].dtype.name]
    body = nibble_format.assembly.format(
        kind=bits.kind, shift=shift, large=bits.large, one=repeat_half(bits.one),
        lack=repeat_half(bits.bias_factor), size=repeat_half(7 << bits.mantissa_bit),
        to_size=bits.mantissa_bit - shift, to_sign=12 - shift,
    )  # fmt: skip
    constraints = ",".join(["=&r", "=&r", *["r"] * (1 + 2 * len(operands))])
    out = [jax.ShapeDtypeStruct(codes.shape, operands[0].dtype)]
    return triton.elementwise_inline_asm(
        body, args=[codes, *operands], constraints=constraints, pack=4, result_shape_dtypes=out
    )[0]


def dequantise_by_arithmetic(
    codes: UInt8[Array, "inner F"], *operands: Any, nibble_format: NibbleFormat, shift: int
) -> Float[Array, "inner F"]:
    """Widen the codes that begin at bit `shift`, like `dequantise_by_assembly`, by arithmetic that can be
    interpreted."""
    return nibble_format.widen(codes >> jnp.uint8(shift) & jnp.uint8(15), *operands)


def repeat_half(half: int) -> str:
    """Return a 32-bit word of two equal halves, in hexadecimal."""
    return f"{half << 16 | half:#010x}"


def scales_to_float32(scales: Any) -> Any:
    """Convert scales to float32. Bytes are the exponents of e8m0."""
    if scales.dtype != jnp.uint8:
        return scales.astype(jnp.float32)
    return jax.lax.bitcast_convert_type(scales.astype(jnp.uint32) << jnp.uint32(23), jnp.float32)


def dequantise_nibbles(codes: NibbleCodes, dtype: Any) -> Float[Array, "D F"]:
    """Widen a matrix of codes to an array."""
    pairs, scales = codes.values, codes.scales.astype(jnp.float32)
    nibbles = jnp.stack([pairs & jnp.uint8(15), pairs >> jnp.uint8(4)], 1)
    nibbles = nibbles.reshape(len(scales), -1, scales.shape[1])
    zeros = jnp.int8(ZERO_CODE) if codes.zeros is None else codes.zeros.astype(jnp.int8)[:, None]
    numbers = (nibbles.astype(jnp.int8) - zeros).astype(jnp.float32) * scales[:, None]
    return numbers.astype(dtype).reshape(-1, scales.shape[1])


def partition_nibbles(dtype: Any, interpret: bool, mesh: Any, shapes: Any, result: Any) -> Any:
    """Partition the product: every device multiplies by the codes that it holds.

    Sums over a split inner dimension are all-reduced.
    """
    groups, F = shapes[1].scales.shape
    inner, columns, *_ = (*shapes[1].values.sharding.spec, None, None)
    inner = (
        inner
        if (shapes[1].values.shape[0] if groups == 1 else groups) % num_splits(mesh, inner) == 0
        else None
    )
    columns = columns if F % num_splits(mesh, columns) == 0 else None
    specs = (None, inner), (inner, columns), (inner if groups > 1 else None, columns), (None, columns)
    whole, codes_sharding, group_sharding, out = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in specs)

    def multiply_local(rows: Float[Array, "rows D"], codes: NibbleCodes) -> Float[Array, "rows F"]:
        if inner is None:
            return multiply_padded_nibbles.fun(rows, codes, dtype, interpret)
        return jax.lax.psum(multiply_padded_nibbles.fun(rows, codes, dtype, interpret), inner)

    return (
        mesh,
        multiply_local,
        out,
        (
            whole,
            NibbleCodes(codes_sharding, group_sharding, None if shapes[1].zeros is None else group_sharding),
        ),
    )


def nibble_sharding_rule(
    dtype: Any, interpret: bool, mesh: Any, values: Any, results: Any
) -> tuple[str, dict[str, int]]:
    """Return the sharding rule for XLA's partitioner.

    Columns may be split, and groups. If all bytes of a column share a scale, bytes may be split.
    """
    (D, groups), zeros = (values[0].shape[1], values[2].shape[0]), len(values) == 4
    if groups == 1:
        return ", ".join(["m (p d)", "p f", *["g f"] * (1 + zeros)]) + " -> m f", {"d": 2}
    sizes = {"d": D // groups, "p": D // groups // 2}
    return ", ".join(["m (g d)", "(g p) f", *["g f"] * (1 + zeros)]) + " -> m f", sizes


multiply_padded_nibbles.def_partition(partition_nibbles, sharding_rule=nibble_sharding_rule)

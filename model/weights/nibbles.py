"""Products with weights of four bits on NVIDIA GPUs: codes are widened inside the kernel, so that only their
bytes are read (Pallas, Triton backend).

XLA widens them into memory first: it does not fuse scales of groups into a product. The two codes of a byte
multiply x's even and odd numbers. Instructions for two numbers of 16 bits each widen them, as in
FasterTransformer (Kim et al., arXiv 2211.10017): Triton's own take one. Tiles, and the parts that the inner
dimension is cut into, follow from the weight alone, so a row's bits do not depend on how many rows are
beside it.
"""

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
from ..sharding import in_shards, ways

ROWS = 64  # of x in a tile
STEPS = 64, 32  # bytes of a column that a step takes: as many as divide the column
COLUMNS = 64  # of a block
BLOCKS, PARTS = 264, 8  # most blocks, two a multiprocessor, and most parts of the inner dimension
ZERO = 8  # the code of zero where there are no others
NIBBLES = Kernel("int4_product", "triton", "XLA widens weights into memory")
SCALES = ("bfloat16", "float16", "float32")


class FloatBits(NamedTuple):
    """Bits of a 16-bit dtype.

    kind: its name in PTX.
    large, least: the high byte of the least number whose last bit counts one, and that number.
    one, half: 1 and 0.5.
    place: of a mantissa's first bit.
    lack: the factor that corrects the bias of the exponent of an e2m1 there.
    """

    kind: str
    large: int
    least: int
    one: int
    half: int
    place: int
    lack: int


FLOATS = {
    "bfloat16": FloatBits("bf16x2", 0x43, 128, 0x3F80, 0x3F00, 6, 0x7E80),
    "float16": FloatBits("f16x2", 0x64, 1024, 0x3C00, 0x3800, 9, 0x7400),
}
# The numbers of four bytes' low or high codes ($0, $1) of a word of codes ($2), words of two factors ($3, $4)
# and, of int4, what is added to a code as the last bits of a large number ($5, $6). To add -0 keeps signs;
# sums and products are `fma`, since others of two bfloat16 numbers need compute capability 9.0.
ASSEMBLY = {
    "int4": """{{
        .reg .b32 one, none, a, b;
        mov.b32 one, {one}; mov.b32 none, 0x80008000;
        shr.u32 a, $2, {shift}; and.b32 a, a, 0x0f0f0f0f;
        prmt.b32 b, a, {large}, 0x4342; prmt.b32 a, a, {large}, 0x4140;
        fma.rn.{kind} a, a, one, $5; fma.rn.{kind} b, b, one, $6;
        fma.rn.{kind} $0, a, $3, none; fma.rn.{kind} $1, b, $4, none;
    }}""",
    "fp4": """{{
        .reg .b32 lack, none, sign, a, b;
        mov.b32 lack, {lack}; mov.b32 none, 0x80008000;
        prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;
        shl.b32 sign, a, {to_sign}; and.b32 sign, sign, none;
        shl.b32 a, a, {to_size}; and.b32 a, a, {size}; or.b32 a, a, sign;
        shl.b32 sign, b, {to_sign}; and.b32 sign, sign, none;
        shl.b32 b, b, {to_size}; and.b32 b, b, {size}; or.b32 b, b, sign;
        fma.rn.{kind} a, a, lack, none; fma.rn.{kind} b, b, lack, none;
        fma.rn.{kind} $0, a, $3, none; fma.rn.{kind} $1, b, $4, none;
    }}""",
}


class NibbleCodes(NamedTuple):
    """A matrix as bytes of two codes each, neighbours of a column, and scales and zeros of groups of them."""

    values: Any  # uint8 [D/2, F]
    scales: Any  # [groups, F]
    zeros: Any  # like scales, or None


class NibbleTiles(NamedTuple):
    """Tiling of a product. `parts`: pieces of the inner dimension. `group`: bytes of a column that share a
    scale. `step`: those that are multiplied at once."""

    parts: int
    group: int
    step: int

    @property
    def label(self) -> str:
        """The name under which a compiled program shows it."""
        return f"tiles_{ROWS}x{COLUMNS}x{2 * self.step}x{self.parts}"


def cut_of(inner: int, columns: int, groups: int) -> NibbleTiles | None:
    """Tiling for a weight of [inner, columns] numbers with `groups` groups, or None if the kernel cannot
    multiply it."""
    group, step = inner // 2 // groups, next((step for step in STEPS if inner % (2 * step) == 0), 0)
    if columns % COLUMNS or not group or not step or (group % step and step % group):
        return None
    blocks, steps = columns // COLUMNS, inner // (2 * step)
    fitting = (n for n in range(PARTS, 1, -1) if steps % n == 0 and n * blocks <= BLOCKS)
    return NibbleTiles(next(fitting, 1), group, step)


def grouped(shape: tuple[int, ...], scales: tuple[int, ...], inputs: int) -> bool:
    """True if each output has its own scales, for consecutive groups of inputs."""
    split = next((i for i in range(inputs) if scales[i] != shape[i]), inputs)
    return scales[inputs:] == shape[inputs:] and set(scales[split + 1 : inputs]) <= {1}


@partial(jax.jit, static_argnames=("dtype", "interpret"))  # layers share one trace
def multiply(
    rows: Float[Array, "rows D"], codes: NibbleCodes, dtype: Any, interpret: bool = False
) -> Float[Array, "rows F"]:
    """The product with a matrix of codes that has a cut."""
    padded = jnp.pad(rows, ((0, -len(rows) % ROWS), (0, 0)))
    product = partitioned.fun if in_shards(padded) else partitioned
    return product(padded, codes, dtype, interpret)[: len(rows)]


@partial(custom_partitioning, static_argnums=(2, 3))
def partitioned(
    rows: Float[Array, "rows D"], codes: NibbleCodes, dtype: Any, interpret: bool
) -> Float[Array, "rows F"]:
    (M, D), F = rows.shape, codes.values.shape[1]
    cut = cut_of(D, F, len(codes.scales))
    if cut is None:  # a device's part of a matrix that has one
        return jnp.dot(rows, widened(codes, rows.dtype), preferred_element_type=jnp.float32).astype(dtype)
    even, odd = (rows.reshape(M, D // 2, 2)[..., i] for i in range(2))
    with jax.named_scope(cut.label):
        sums = pl.pallas_call(
            partial(kernel, cut=cut, steps=D // (2 * cut.step * cut.parts), interpret=interpret),
            grid=(F // COLUMNS, M // ROWS, cut.parts),
            out_shape=jax.ShapeDtypeStruct((cut.parts, M, F), jnp.float32 if cut.parts > 1 else dtype),
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=4),
            interpret=interpret,
            name="multiply_nibbles",
        )(even, odd, codes)
    return sums[0] if cut.parts == 1 else sums.sum(0).astype(dtype)


def kernel(
    even: Any, odd: Any, codes: NibbleCodes, out: Any, *, cut: NibbleTiles, steps: int, interpret: bool
):
    columns = pl.ds(pl.program_id(0) * COLUMNS, COLUMNS)
    rows, part = pl.ds(pl.program_id(1) * ROWS, ROWS), pl.program_id(2)

    def step(i: Any, total: Float[Array, "rows F"]) -> Float[Array, "rows F"]:
        first = (part * steps + i) * cut.step
        inner = pl.ds(first, cut.step)
        pairs = codes.values[inner, columns]
        scales = of_groups(codes.scales, first, columns, cut)
        zeros = None if codes.zeros is None else of_groups(codes.zeros, first, columns, cut)
        for x, w in zip(
            (even, odd), numbers_of(pairs, scales, zeros, even.dtype, interpret=interpret), strict=True
        ):
            total += jnp.dot(x[rows, inner], w, preferred_element_type=jnp.float32)
        return total

    total = jax.lax.fori_loop(0, steps, step, jnp.zeros((ROWS, COLUMNS), jnp.float32))
    out[part, rows, columns] = total.astype(out.dtype)


def of_groups(ref: Any, first: Any, columns: Any, cut: NibbleTiles) -> Any:
    """The entries of a step's groups, each as often as the group has bytes in it."""
    n = max(cut.step // cut.group, 1)
    own = ref[pl.ds(first // cut.group, n), columns]
    return jnp.broadcast_to(own[:, None], (n, cut.step // n, COLUMNS)).reshape(cut.step, COLUMNS)


def numbers_of(
    codes: UInt8[Array, "inner F"],
    scales: Num[Array, "inner F"],
    zeros: Num[Array, "inner F"] | None,
    dtype: Any,
    scheme: str = "int4",
    interpret: bool = False,
) -> list[Float[Array, "inner F"]]:
    """Inside a kernel: the numbers of low codes and those of high ones, times their scales. They are
    multiplied in 16 bits where the scales are of the dtype, or powers of two of bfloat16's range: it rounds
    as often as float32."""
    are_powers = scales.dtype == jnp.uint8 and dtype == jnp.bfloat16
    in_16_bits = are_powers or scales.dtype == dtype
    scales = scales if scales.dtype == dtype else floats(scales)
    factors = scales.astype(dtype) if in_16_bits else jnp.ones(codes.shape, dtype)
    given = [factors]
    if scheme == "int4":
        least = FLOATS[dtype.name].least
        given += [
            jnp.full(codes.shape, -least - ZERO, dtype) if zeros is None else -least - zeros.astype(dtype)
        ]
    found = [
        (plainly if interpret else in_pairs)(codes, *given, scheme=scheme, shift=shift) for shift in (0, 4)
    ]
    return found if in_16_bits else [(number.astype(jnp.float32) * scales).astype(dtype) for number in found]


def in_pairs(codes: UInt8[Array, "inner F"], *given: Any, scheme: str, shift: int) -> Float[Array, "inner F"]:
    """Numbers of the codes that begin at a bit, by instructions that make two each."""
    bits = FLOATS[given[0].dtype.name]
    body = ASSEMBLY[scheme].format(
        kind=bits.kind, shift=shift, large=bits.large, one=twice(bits.one),
        lack=twice(bits.lack), size=twice(7 << bits.place), to_size=bits.place - shift, to_sign=12 - shift,
    )  # fmt: skip
    constraints = ",".join(["=&r", "=&r", *["r"] * (1 + 2 * len(given))])
    out = [jax.ShapeDtypeStruct(codes.shape, given[0].dtype)]
    return triton.elementwise_inline_asm(
        body, args=[codes, *given], constraints=constraints, pack=4, result_shape_dtypes=out
    )[0]


def plainly(codes: UInt8[Array, "inner F"], *given: Any, scheme: str, shift: int) -> Float[Array, "inner F"]:
    """The same by arithmetic that can be interpreted."""
    factors, *added = given
    bits, nibbles = FLOATS[factors.dtype.name], codes >> jnp.uint8(shift) & jnp.uint8(15)
    float_of = partial(jax.lax.bitcast_convert_type, new_dtype=factors.dtype)
    if scheme == "int4":
        large = nibbles.astype(jnp.uint16) | jnp.uint16(bits.large << 8)
        return (float_of(large) + added[0]) * factors
    size = (nibbles & jnp.uint8(7)).astype(jnp.uint16)
    normal = (size << jnp.uint16(bits.place)) + jnp.uint16(bits.half)
    found = jnp.where(size < 2, size * jnp.uint16(bits.half), normal)
    sign = (nibbles & jnp.uint8(8)).astype(jnp.uint16) << jnp.uint16(12)
    return float_of(found | sign) * factors


def twice(half: int) -> str:
    """A word of two equal halves."""
    return f"{half << 16 | half:#010x}"


def floats(scales: Any) -> Any:
    """Scales in float32; bytes are the exponents of e8m0."""
    if scales.dtype != jnp.uint8:
        return scales.astype(jnp.float32)
    return jax.lax.bitcast_convert_type(scales.astype(jnp.uint32) << jnp.uint32(23), jnp.float32)


def widened(codes: NibbleCodes, dtype: Any) -> Float[Array, "D F"]:
    """The matrix as an array."""
    pairs, scales = codes.values, codes.scales.astype(jnp.float32)
    nibbles = jnp.stack([pairs & jnp.uint8(15), pairs >> jnp.uint8(4)], 1)
    nibbles = nibbles.reshape(len(scales), -1, scales.shape[1])
    zeros = jnp.int8(ZERO) if codes.zeros is None else codes.zeros.astype(jnp.int8)[:, None]
    numbers = (nibbles.astype(jnp.int8) - zeros).astype(jnp.float32) * scales[:, None]
    return numbers.astype(dtype).reshape(-1, scales.shape[1])


def on_each_device(dtype: Any, interpret: bool, mesh: Any, shapes: Any, result: Any) -> Any:
    """Every device of a mesh multiplies with the codes that it holds; sums over an inner dimension that is
    split are added up."""
    groups, F = shapes[1].scales.shape
    inner, columns, *_ = (*shapes[1].values.sharding.spec, None, None)
    inner = inner if (shapes[1].values.shape[0] if groups == 1 else groups) % ways(mesh, inner) == 0 else None
    columns = columns if F % ways(mesh, columns) == 0 else None
    specs = (None, inner), (inner, columns), (inner if groups > 1 else None, columns), (None, columns)
    whole, own, each, out = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in specs)

    def local(rows: Float[Array, "rows D"], codes: NibbleCodes) -> Float[Array, "rows F"]:
        if inner is None:
            return partitioned.fun(rows, codes, dtype, interpret)
        return jax.lax.psum(partitioned.fun(rows, codes, dtype, interpret), inner)

    return mesh, local, out, (whole, NibbleCodes(own, each, None if shapes[1].zeros is None else each))


def axes(dtype: Any, interpret: bool, mesh: Any, values: Any, results: Any) -> tuple[str, dict[str, int]]:
    """The sharding rule for XLA's partitioner: columns may be split, and groups, or bytes where all share a
    scale."""
    (D, groups), zeros = (values[0].shape[1], values[2].shape[0]), len(values) == 4
    if groups == 1:
        return ", ".join(["m (p d)", "p f", *["g f"] * (1 + zeros)]) + " -> m f", {"d": 2}
    sizes = {"d": D // groups, "p": D // groups // 2}
    return ", ".join(["m (g d)", "(g p) f", *["g f"] * (1 + zeros)]) + " -> m f", sizes


partitioned.def_partition(on_each_device, sharding_rule=axes)

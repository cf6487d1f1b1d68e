"""Weights in eight or four bits: a record that stands where an array stood, behind the same einsum.

Only weights are quantised; activations keep their dtype. Codes are widened where they are multiplied, which
XLA fuses into the product on accelerators. A scale that belongs to an output (or an input) multiplies the
product (or the input) instead.
"""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, Num, UInt8

from ..gpus import may_use
from ..layers import einsum, ragged_product
from ..sharding import axes_of, in_shards, on_several_devices
from . import expert_tiles, nibbles

Scheme = Literal["int8", "int4", "fp8", "fp4"]
# numbers along the packed axis that share a four-bit scale: the largest that divides
GROUPS = (32, 16, 8, 4, 2)
FP8_MAX, INT8_MAX = 448.0, 127.0


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales", "zeros"],
    meta_fields=["scheme", "packed"],
)
@dataclass(frozen=True)
class Quantised:
    """A weight as codes and scales: each number is (code - zero) * scale.

    `scales` has the weight's axes; an entry covers an equal block of each axis, all of it where its size is
    1. In the four-bit schemes a byte of `values` holds two neighbours along the axis `packed` (counted from
    the last, so that experts may stand before it), the even one in the low bits: `int4` numbers 0..15 around
    `zeros`, or around 8 where that is None; `fp4` floats of the OCP Microscaling format, e2m1.
    """

    values: Any  # int8, float8_e4m3fn or uint8
    scales: Any  # of any float, float8_e8m0fnu included
    zeros: Any = None  # int8 or uint8, in the shape of scales
    scheme: Scheme = "int8"
    packed: int = -1

    @property
    def shape(self) -> tuple[int, ...]:
        """The weight's, not that of its bytes."""
        shape = list(self.values.shape)
        if self.scheme in ("int4", "fp4"):
            shape[self.packed] *= 2
        return tuple(shape)

    @property
    def factors(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays that `ragged` multiplies rows with."""
        return (self.shape,)

    def einsum(self, equation: str, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """The product of x and this weight, in x's dtype or another."""
        dtype, inputs = dtype or x.dtype, leading(equation)
        elsewhere = partial(widening, equation=equation, dtype=dtype)
        if not self.has_kernel(x, inputs) or not may_use(nibbles.NIBBLES):
            return elsewhere(x, self)
        return jax.lax.platform_dependent(
            x, self, cuda=partial(by_kernel, inputs=inputs, dtype=dtype), default=elsewhere
        )

    def has_kernel(self, x: Float[Array, "..."], inputs: int) -> bool:
        """True if a GPU kernel multiplies x, summing over the weight's first `inputs` axes."""
        shape, scales = self.shape, self.scales.shape
        return (
            self.scheme == "int4"
            and 0 < inputs == self.packed % len(shape) + 1
            and x.dtype.itemsize == 2
            and self.scales.dtype.name in nibbles.SCALES
            and nibbles.grouped(shape, scales, inputs)
            and nibbles.cut_of(prod(shape[:inputs]), prod(shape[inputs:]), prod(scales[:inputs])) is not None
            and not (in_shards(self.values) and on_several_devices(self.values))
        )

    @property
    def has_scales_of_outputs(self) -> bool:
        """True if 8-bit codes have one scale for each number of an axis, or one for all."""
        sizes = zip(self.scales.shape, self.values.shape, strict=True)
        return self.scheme in ("int8", "fp8") and all(n in (1, size) for n, size in sizes)

    def by_widening(self, equation: str, x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
        """The product with an array, that of the codes where scales can multiply it or x instead."""
        left, letters, out = terms(equation)
        scaled = {letter for letter, size in zip(letters, self.scales.shape, strict=True) if size > 1}
        if scaled <= set(out):
            is_split = on_several_devices(self.values) and self.has_scales_of_outputs
            is_split = is_split and not in_shards(self.values)
            here = partial(scaled_product, equation=equation, dtype=dtype)
            if not is_split:
                return here(x, self.codes(), self.scales)

            def together(x: Any, codes: Any, scales: Any) -> Float[Array, "..."]:
                return partitioned(x, codes, scales, equation, dtype)

            # jax cannot call a TPU's partitioner back
            return jax.lax.platform_dependent(x, self.codes(), self.scales, tpu=here, default=together)
        if scaled <= set(left):
            x = (x.astype(jnp.float32) * against(self.scales, letters, left, x.shape)).astype(x.dtype)
            return einsum(equation, x, self.codes().astype(x.dtype), dtype)
        return einsum(equation, x, self.widened(x.dtype), dtype)

    def ragged(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], owner: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """Products of consecutive rows with one expert's weights each."""
        own = expert_tiles.ExpertMatrices(self.values, self.scales, self.zeros)
        if not expert_tiles.can_widen(own, self.scheme, self.shape, self.packed, rows.dtype):
            return ragged_by_widening(rows, self, sizes, owner)
        return jax.lax.platform_dependent(
            rows, self, sizes, owner, cuda=ragged_by_kernel, default=ragged_by_widening
        )

    def ragged_by_widening(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], owner: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """The same with arrays, the codes where a scale is an output's."""
        if self.scales.shape[1] > 1:
            return ragged_product(rows, self.widened(rows.dtype), sizes, owner)
        product = ragged_product(rows, self.codes().astype(rows.dtype), sizes, owner)
        scales = spread(self.scales[owner, 0].astype(jnp.float32), product.shape)
        return (product.astype(jnp.float32) * scales).astype(rows.dtype)

    def widened(self, dtype: Any) -> Float[Array, "..."]:
        """The weight as an array."""
        codes, scales = self.codes().astype(jnp.float32), self.scales.astype(jnp.float32)
        return (codes * spread(scales, codes.shape)).astype(dtype)

    def codes(self) -> Num[Array, "..."]:
        """Codes less zeros, in the weight's shape."""
        if self.scheme in ("int8", "fp8"):
            if self.zeros is None:
                return self.values
            return self.values.astype(jnp.int16) - spread(self.zeros.astype(jnp.int16), self.values.shape)
        nibbles = unpack(self.values, self.packed)
        if self.scheme == "fp4":
            return e2m1(nibbles)
        zeros = jnp.int8(8) if self.zeros is None else spread(self.zeros.astype(jnp.int8), nibbles.shape)
        return nibbles.astype(jnp.int8) - zeros


def widening(x: Float[Array, "..."], w: Quantised, equation: str, dtype: Any) -> Float[Array, "..."]:
    return w.by_widening(equation, x, dtype)


def scaled_product(
    x: Float[Array, "..."], codes: Num[Array, "..."], scales: Float[Array, "..."], equation: str, dtype: Any
) -> Float[Array, "..."]:
    """The product of x and codes, whose outputs the scales multiply; its sums are float32."""
    _, letters, out = terms(equation)
    product = einsum(equation, x, codes.astype(x.dtype), jnp.float32)
    return (product * against(scales, letters, out, product.shape)).astype(dtype)


def by_kernel(x: Float[Array, "..."], w: Quantised, inputs: int, dtype: Any) -> Float[Array, "..."]:
    """The product of matrices: x's rows by w's first axes, whose numbers stay codes."""
    inner, columns = prod(w.shape[:inputs]), prod(w.shape[inputs:])
    parts = (None if part is None else part.reshape(-1, columns) for part in (w.values, w.scales, w.zeros))
    product = nibbles.multiply(x.reshape(-1, inner), nibbles.NibbleCodes(*parts), dtype)
    return product.reshape(*x.shape[: x.ndim - inputs], *w.shape[inputs:])


def ragged_by_widening(
    rows: Float[Array, "rows D"], w: Quantised, sizes: Int[Array, " E"], owner: Int[Array, " rows"]
) -> Float[Array, "rows F"]:
    return w.ragged_by_widening(rows, sizes, owner)


def ragged_by_kernel(
    rows: Float[Array, "rows D"],
    w: Quantised,
    sizes: Int[Array, " E"],
    owner: Int[Array, " rows"] | None = None,
    interpret: bool = False,
) -> Float[Array, "rows F"]:
    """The same by a GPU's kernel; experts' numbers stay codes."""
    own = expert_tiles.ExpertMatrices(w.values, w.scales, w.zeros)
    return expert_tiles.multiply(rows, own, sizes, w.scheme, interpret)


def leading(equation: str) -> int:
    """Number of first axes of w, x's last ones, over which a product sums; 0 for any other product."""
    left, right, out = terms(equation)
    summed = "".join(letter for letter in right if letter in left and letter not in out)
    kept = left.removesuffix(summed) + right.removeprefix(summed)
    return len(summed) if left.endswith(summed) and right.startswith(summed) and kept == out else 0


def terms(equation: str) -> tuple[str, str, str]:
    """The letters of both operands and of the product; "..." is left out, and can only stand first."""
    operands, out = equation.replace("...", "").split("->")
    left, right = operands.split(",")
    return left, right, out


def against(
    scales: Float[Array, "..."], letters: str, target: str, shape: tuple[int, ...]
) -> Float[Array, "..."]:
    """Float32 scales of axes `letters` as they multiply an array of a shape with last axes `target`."""
    shared = [letter for letter in target if letter in letters]
    unit = tuple(i for i, letter in enumerate(letters) if letter not in target)
    kept = [letter for letter in letters if letter in target]
    turned = scales.squeeze(unit).transpose([kept.index(letter) for letter in shared])
    sizes = dict(zip(shared, turned.shape, strict=True))
    blocks = (1,) * (len(shape) - len(target)) + tuple(sizes.get(letter, 1) for letter in target)
    whole = tuple(1 if n == 1 else size for n, size in zip(blocks, shape, strict=True))
    return spread(turned.reshape(blocks).astype(jnp.float32), whole)


def spread(blocks: Num[Array, "..."], shape: tuple[int, ...]) -> Num[Array, "..."]:
    """Each entry repeated over its block of an array of this shape."""
    if blocks.shape == shape:
        return blocks
    pairs = [(n, size // n) for n, size in zip(blocks.shape, shape, strict=True)]
    single = blocks.reshape([size for n, _ in pairs for size in (n, 1)])
    return jnp.broadcast_to(single, [size for pair in pairs for size in pair]).reshape(shape)


def unpack(pairs: UInt8[Array, "..."], axis: int) -> UInt8[Array, "..."]:
    """Two codes of four bits from each byte, neighbours along an axis."""
    axis %= pairs.ndim
    codes = jnp.stack([pairs & jnp.uint8(15), pairs >> jnp.uint8(4)], axis + 1)
    return codes.reshape(*pairs.shape[:axis], -1, *pairs.shape[axis + 1 :])


def pack(codes: UInt8[Array, "..."], axis: int) -> UInt8[Array, "..."]:
    """Codes 0..15, two to a byte."""
    axis %= codes.ndim
    even, odd = (jax.lax.slice_in_dim(codes, i, None, 2, axis) for i in range(2))
    return even | (odd << jnp.uint8(4))


def e2m1(codes: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Four-bit floats: a sign, two bits of exponent, one of mantissa; 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    size, exponent = codes & jnp.uint8(7), (codes & jnp.uint8(7)) >> jnp.uint8(1)
    normal = ((size & jnp.uint8(1)) | jnp.uint8(2)) << (jnp.maximum(exponent, jnp.uint8(1)) - jnp.uint8(1))
    halves = jnp.where(exponent == 0, size, normal).astype(jnp.float32)
    return jnp.where(codes < 8, halves, -halves) * 0.5


def quantised(weight: Float[Array, "..."], contracted: tuple[int, ...], scheme: Scheme) -> Quantised | None:
    """A weight in one of "int8", "int4" and "fp8", whose products sum over the axes `contracted`, counted
    from the last.

    Eight-bit schemes have a scale per output channel, int4 one per group along the last of those axes, in
    bfloat16. Returns None where int4 cannot pair the axis' numbers.
    """
    w, axis = weight.astype(jnp.float32), contracted[-1]
    if scheme in ("int8", "fp8"):
        top, dtype = (INT8_MAX, jnp.int8) if scheme == "int8" else (FP8_MAX, jnp.float8_e4m3fn)
        scales = nonzero(jnp.max(jnp.abs(w), axis=contracted, keepdims=True) / top)
        codes = jnp.clip(w / scales, -top, top)
        return Quantised(
            (jnp.round(codes) if scheme == "int8" else codes).astype(dtype), scales, scheme=scheme
        )
    group = next((g for g in GROUPS if w.shape[axis] % g == 0), None)
    if group is None:
        return None
    scales = group_scales(w, axis % w.ndim, group)
    codes = jnp.clip(jnp.round(w / spread(scales.astype(jnp.float32), w.shape)) + 8, 0, 15)
    return Quantised(pack(codes.astype(jnp.uint8), axis), scales, None, "int4", axis)


def nonzero(scales: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return jnp.where(scales == 0, 1, scales)


def group_scales(w: Float[Array, "..."], axis: int, group: int) -> Float[Array, "..."]:
    """A bfloat16 scale for each group of numbers along an axis: its largest number, signed, becomes -8."""
    shape = (*w.shape[:axis], w.shape[axis] // group, group, *w.shape[axis + 1 :])
    groups = w.reshape(shape)
    low, high = groups.min(axis + 1), groups.max(axis + 1)
    return nonzero(jnp.where(-low > high, low, high) / -8).astype(jnp.bfloat16)


# ---------------------------------------------------------------- on several devices

partitioned = custom_partitioning(scaled_product, static_argnums=(3, 4))


def on_each_device(equation: str, dtype: Any, mesh: Any, shapes: Any, result: Any) -> Any:
    """Each device scales what it made of the codes that it holds, so that sums over devices are of the
    model's dtype: XLA's partitioner would add up what is not scaled yet, in float32."""
    x, codes, scales = shapes
    left, letters, out = terms(equation)
    split = {letter: axes_of(codes, i) or None for i, letter in enumerate(letters)}
    over = tuple(name for letter in letters if letter not in out for name in split[letter] or ())

    def place(letters: str, shape: tuple[int, ...]) -> NamedSharding:
        before = (None,) * (len(shape) - len(letters))
        last = shape[len(before) :]
        axes = (None if size == 1 else split.get(letter) for letter, size in zip(letters, last, strict=True))
        return NamedSharding(mesh, PartitionSpec(*before, *axes))

    def local(
        x: Float[Array, "..."], codes: Num[Array, "..."], scales: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        product = scaled_product(x, codes, scales, equation, dtype)
        return jax.lax.psum(product, over) if over else product

    places = place(left, x.shape), place(letters, codes.shape), place(letters, scales.shape)
    return mesh, local, place(out, result.shape), places


def rule(equation: str, dtype: Any, mesh: Any, values: Any, results: Any) -> str:
    """The sharding rule for XLA's partitioner: the equation's letters, and for a scale's axes of size 1 their
    own."""
    left, letters, out = terms(equation)
    rows = [f"row{i}" for i in range(values[0].rank - len(left))]
    scales = [f"one{i}" if n == 1 else letters[i] for i, n in enumerate(values[2].shape)]
    operands = [*rows, *left], [*letters], scales
    return ", ".join(map(" ".join, operands)) + " -> " + " ".join([*rows, *out])


partitioned.def_partition(on_each_device, sharding_rule=rule)

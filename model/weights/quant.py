"""Weights in eight or four bits: a record in place of an array, with the same einsum.

Only weights are quantised; activations keep their dtype. Codes are widened where they are multiplied, which
XLA fuses into the product on accelerators. A scale of an output (or an input) multiplies the product (or the
input) instead.
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

from ..gpus import may_use_kernel
from ..layers import einsum, ragged_dot
from ..sharding import is_manual_shard, is_multi_device, sharded_axes
from . import expert_tiles, nibbles

Scheme = Literal["int8", "int4", "fp8", "fp4"]
# numbers along the packed axis that share a four-bit scale: the largest that divides
GROUP_SIZES = (32, 16, 8, 4, 2)
FP8_MAX, INT8_MAX = 448.0, 127.0


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["values", "scales", "zeros"],
    meta_fields=["scheme", "packed"],
)
@dataclass(frozen=True)
class Quantised:
    """A weight as codes and scales: each number is (code - zero) * scale.

    `scales` has the weight's axes. An entry covers an equal block of each axis, all of it if its size is 1.
    In the 4-bit schemes a byte of `values` holds two neighbours along the axis `packed`, the even one in the
    low bits. It is counted from the last axis, so that experts may come first. `int4` has numbers 0..15
    around `zeros`, or around 8 if that is None. `fp4` has floats of the OCP Microscaling format, e2m1.
    """

    values: Any  # int8, float8_e4m3fn or uint8
    scales: Any  # of any float, float8_e8m0fnu included
    zeros: Any = None  # int8 or uint8, in the shape of scales
    scheme: Scheme = "int8"
    packed: int = -1

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the weight's shape, which may differ from the shape of its bytes."""
        shape = list(self.values.shape)
        if self.scheme in ("int4", "fp4"):
            shape[self.packed] *= 2
        return tuple(shape)

    @property
    def ragged_dot_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the arrays that `ragged_dot` multiplies rows by."""
        return (self.shape,)

    def einsum(self, equation: str, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """Compute the product of x and this weight, in x's dtype or another."""
        dtype, inputs = dtype or x.dtype, count_contracted_axes(equation)
        fallback = partial(einsum_by_xla, equation=equation, dtype=dtype)
        if not self.has_nibble_kernel(x, inputs) or not may_use_kernel(nibbles.NIBBLE_KERNEL):
            return fallback(x, self)
        return jax.lax.platform_dependent(
            x, self, cuda=partial(einsum_by_kernel, inputs=inputs, dtype=dtype), default=fallback
        )

    def has_nibble_kernel(self, x: Float[Array, "..."], inputs: int) -> bool:
        """Return True if a GPU kernel multiplies x, summing over the weight's first `inputs` axes."""
        shape, scales = self.shape, self.scales.shape
        return (
            self.scheme == "int4"
            and 0 < inputs == self.packed % len(shape) + 1
            and x.dtype.itemsize == 2
            and self.scales.dtype.name in nibbles.NIBBLE_SCALE_DTYPES
            and nibbles.has_group_scales(shape, scales, inputs)
            and nibbles.choose_nibble_tiles(prod(shape[:inputs]), prod(shape[inputs:]), prod(scales[:inputs]))
            is not None
            and not (is_manual_shard(self.values) and is_multi_device(self.values))
        )

    @property
    def has_channel_scales(self) -> bool:
        """Return True if 8-bit codes have one scale for each number of an axis, or one for all."""
        sizes = zip(self.scales.shape, self.values.shape, strict=True)
        return self.scheme in ("int8", "fp8") and all(n in (1, size) for n, size in sizes)

    def einsum_by_xla(self, equation: str, x: Float[Array, "..."], dtype: Any) -> Float[Array, "..."]:
        """Compute the product with an array: the codes if scales can multiply the product or x, else the
        dequantised weight."""
        left, letters, out = split_equation(equation)
        scaled_letters = {letter for letter, size in zip(letters, self.scales.shape, strict=True) if size > 1}
        if scaled_letters <= set(out):
            is_split = is_multi_device(self.values) and self.has_channel_scales
            is_split = is_split and not is_manual_shard(self.values)
            multiply = partial(scaled_product, equation=equation, dtype=dtype)
            if not is_split:
                return multiply(x, self.signed_codes(), self.scales)

            def multiply_split(x: Any, codes: Any, scales: Any) -> Float[Array, "..."]:
                return partitioned_scaled_product(x, codes, scales, equation, dtype)

            # a TPU's partitioner cannot call back into jax
            return jax.lax.platform_dependent(
                x, self.signed_codes(), self.scales, tpu=multiply, default=multiply_split
            )
        if scaled_letters <= set(left):
            x = (x.astype(jnp.float32) * align_scales(self.scales, letters, left, x.shape)).astype(x.dtype)
            return einsum(equation, x, self.signed_codes().astype(x.dtype), dtype)
        return einsum(equation, x, self.dequantise(x.dtype), dtype)

    def ragged_dot(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], row_experts: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """Multiply consecutive rows by one expert's matrix each."""
        matrices = expert_tiles.ExpertMatrices(self.values, self.scales, self.zeros)
        if not expert_tiles.can_dequantise_experts(
            matrices, self.scheme, self.shape, self.packed, rows.dtype
        ):
            return ragged_dot_by_xla(rows, self, sizes, row_experts)
        return jax.lax.platform_dependent(
            rows, self, sizes, row_experts, cuda=ragged_dot_by_kernel, default=ragged_dot_by_xla
        )

    def ragged_dot_by_xla(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], row_experts: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """Multiply consecutive rows by one expert's matrix each, as an array: the codes if scales are of
        outputs."""
        if self.scales.shape[1] > 1:
            return ragged_dot(rows, self.dequantise(rows.dtype), sizes, row_experts)
        product = ragged_dot(rows, self.signed_codes().astype(rows.dtype), sizes, row_experts)
        scales = spread_blocks(self.scales[row_experts, 0].astype(jnp.float32), product.shape)
        return (product.astype(jnp.float32) * scales).astype(rows.dtype)

    def dequantise(self, dtype: Any) -> Float[Array, "..."]:
        """Dequantise the weight to an array."""
        codes, scales = self.signed_codes().astype(jnp.float32), self.scales.astype(jnp.float32)
        return (codes * spread_blocks(scales, codes.shape)).astype(dtype)

    def signed_codes(self) -> Num[Array, "..."]:
        """Return the codes less their zeros, in the weight's shape."""
        if self.scheme in ("int8", "fp8"):
            if self.zeros is None:
                return self.values
            return self.values.astype(jnp.int16) - spread_blocks(
                self.zeros.astype(jnp.int16), self.values.shape
            )
        nibbles = unpack_nibbles(self.values, self.packed)
        if self.scheme == "fp4":
            return decode_e2m1(nibbles)
        zeros = (
            jnp.int8(8) if self.zeros is None else spread_blocks(self.zeros.astype(jnp.int8), nibbles.shape)
        )
        return nibbles.astype(jnp.int8) - zeros


def einsum_by_xla(x: Float[Array, "..."], w: Quantised, equation: str, dtype: Any) -> Float[Array, "..."]:
    """Call `Quantised.einsum_by_xla` with x as the first argument."""
    return w.einsum_by_xla(equation, x, dtype)


def scaled_product(
    x: Float[Array, "..."], codes: Num[Array, "..."], scales: Float[Array, "..."], equation: str, dtype: Any
) -> Float[Array, "..."]:
    """Compute the product of x and codes, and multiply its outputs by the scales. Its sums are float32."""
    _, letters, out = split_equation(equation)
    product = einsum(equation, x, codes.astype(x.dtype), jnp.float32)
    return (product * align_scales(scales, letters, out, product.shape)).astype(dtype)


def einsum_by_kernel(x: Float[Array, "..."], w: Quantised, inputs: int, dtype: Any) -> Float[Array, "..."]:
    """Compute the product of matrices by the GPU kernel: x's rows by w's first axes. It reads codes only."""
    inner, columns = prod(w.shape[:inputs]), prod(w.shape[inputs:])
    parts = (None if part is None else part.reshape(-1, columns) for part in (w.values, w.scales, w.zeros))
    product = nibbles.multiply_nibbles(x.reshape(-1, inner), nibbles.NibbleCodes(*parts), dtype)
    return product.reshape(*x.shape[: x.ndim - inputs], *w.shape[inputs:])


def ragged_dot_by_xla(
    rows: Float[Array, "rows D"], w: Quantised, sizes: Int[Array, " E"], row_experts: Int[Array, " rows"]
) -> Float[Array, "rows F"]:
    """Call `Quantised.ragged_dot_by_xla` with the rows as the first argument."""
    return w.ragged_dot_by_xla(rows, sizes, row_experts)


def ragged_dot_by_kernel(
    rows: Float[Array, "rows D"],
    w: Quantised,
    sizes: Int[Array, " E"],
    row_experts: Int[Array, " rows"] | None = None,
    interpret: bool = False,
) -> Float[Array, "rows F"]:
    """Multiply consecutive rows by one expert's matrix each with the GPU kernel. It reads codes only."""
    matrices = expert_tiles.ExpertMatrices(w.values, w.scales, w.zeros)
    return expert_tiles.multiply_experts(rows, matrices, sizes, w.scheme, interpret)


def count_contracted_axes(equation: str) -> int:
    """Return the number of w's first axes, x's last ones, over which a product sums. 0 for any other
    product."""
    left, right, out = split_equation(equation)
    summed = "".join(letter for letter in right if letter in left and letter not in out)
    kept = left.removesuffix(summed) + right.removeprefix(summed)
    return len(summed) if left.endswith(summed) and right.startswith(summed) and kept == out else 0


def split_equation(equation: str) -> tuple[str, str, str]:
    """Return the letters of both operands and of the product. "..." is dropped, and can only come first."""
    operands, out = equation.replace("...", "").split("->")
    left, right = operands.split(",")
    return left, right, out


def align_scales(
    scales: Float[Array, "..."], letters: str, target: str, shape: tuple[int, ...]
) -> Float[Array, "..."]:
    """Return float32 scales of axes `letters`, shaped to multiply an array of `shape` with last axes
    `target`."""
    shared = [letter for letter in target if letter in letters]
    unit = tuple(i for i, letter in enumerate(letters) if letter not in target)
    kept = [letter for letter in letters if letter in target]
    transposed = scales.squeeze(unit).transpose([kept.index(letter) for letter in shared])
    sizes = dict(zip(shared, transposed.shape, strict=True))
    blocks = (1,) * (len(shape) - len(target)) + tuple(sizes.get(letter, 1) for letter in target)
    whole = tuple(1 if n == 1 else size for n, size in zip(blocks, shape, strict=True))
    return spread_blocks(transposed.reshape(blocks).astype(jnp.float32), whole)


def spread_blocks(blocks: Num[Array, "..."], shape: tuple[int, ...]) -> Num[Array, "..."]:
    """Repeat each entry over its block of an array of this shape."""
    if blocks.shape == shape:
        return blocks
    pairs = [(n, size // n) for n, size in zip(blocks.shape, shape, strict=True)]
    single = blocks.reshape([size for n, _ in pairs for size in (n, 1)])
    return jnp.broadcast_to(single, [size for pair in pairs for size in pair]).reshape(shape)


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


def decode_e2m1(codes: UInt8[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Decode 4-bit floats: a sign, two bits of exponent, one of mantissa. They are 0, 0.5, 1, 1.5, 2, 3, 4,
    6."""
    size, exponent = codes & jnp.uint8(7), (codes & jnp.uint8(7)) >> jnp.uint8(1)
    normal = ((size & jnp.uint8(1)) | jnp.uint8(2)) << (jnp.maximum(exponent, jnp.uint8(1)) - jnp.uint8(1))
    halves = jnp.where(exponent == 0, size, normal).astype(jnp.float32)
    return jnp.where(codes < 8, halves, -halves) * 0.5


def quantise_weight(
    weight: Float[Array, "..."], contracted: tuple[int, ...], scheme: Scheme
) -> Quantised | None:
    """Quantise a weight in "int8", "int4" or "fp8". Its products sum over the axes `contracted`, counted from
    the last.

    8-bit schemes have a scale per output channel, int4 one per group along the last of those axes, in
    bfloat16. Returns None if int4 cannot pair the axis' numbers.
    """
    w, axis = weight.astype(jnp.float32), contracted[-1]
    if scheme in ("int8", "fp8"):
        top, dtype = (INT8_MAX, jnp.int8) if scheme == "int8" else (FP8_MAX, jnp.float8_e4m3fn)
        scales = replace_zeros(jnp.max(jnp.abs(w), axis=contracted, keepdims=True) / top)
        codes = jnp.clip(w / scales, -top, top)
        return Quantised(
            (jnp.round(codes) if scheme == "int8" else codes).astype(dtype), scales, scheme=scheme
        )
    group = next((g for g in GROUP_SIZES if w.shape[axis] % g == 0), None)
    if group is None:
        return None
    scales = compute_group_scales(w, axis % w.ndim, group)
    codes = jnp.clip(jnp.round(w / spread_blocks(scales.astype(jnp.float32), w.shape)) + 8, 0, 15)
    return Quantised(pack_nibbles(codes.astype(jnp.uint8), axis), scales, None, "int4", axis)


def replace_zeros(scales: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Replace scales of zero by one."""
    return jnp.where(scales == 0, 1, scales)


def compute_group_scales(w: Float[Array, "..."], axis: int, group: int) -> Float[Array, "..."]:
    """Return a bfloat16 scale for each group of numbers along an axis: its largest number, signed, becomes
    -8."""
    shape = (*w.shape[:axis], w.shape[axis] // group, group, *w.shape[axis + 1 :])
    groups = w.reshape(shape)
    low, high = groups.min(axis + 1), groups.max(axis + 1)
    return replace_zeros(jnp.where(-low > high, low, high) / -8).astype(jnp.bfloat16)


# ---------------------------------------------------------------- on several devices

partitioned_scaled_product = custom_partitioning(scaled_product, static_argnums=(3, 4))


def partition_scaled_product(equation: str, dtype: Any, mesh: Any, shapes: Any, result: Any) -> Any:
    """Partition the product: each device scales its product with the codes that it holds.

    Sums over devices are then of the model's dtype. XLA's partitioner would all-reduce unscaled sums in
    float32.
    """
    x, codes, scales = shapes
    left, letters, out = split_equation(equation)
    split = {letter: sharded_axes(codes, i) or None for i, letter in enumerate(letters)}
    over = tuple(name for letter in letters if letter not in out for name in split[letter] or ())

    def letter_sharding(letters: str, shape: tuple[int, ...]) -> NamedSharding:
        before = (None,) * (len(shape) - len(letters))
        last = shape[len(before) :]
        axes = (None if size == 1 else split.get(letter) for letter, size in zip(letters, last, strict=True))
        return NamedSharding(mesh, PartitionSpec(*before, *axes))

    def multiply_local(
        x: Float[Array, "..."], codes: Num[Array, "..."], scales: Float[Array, "..."]
    ) -> Float[Array, "..."]:
        product = scaled_product(x, codes, scales, equation, dtype)
        return jax.lax.psum(product, over) if over else product

    shardings = (
        letter_sharding(left, x.shape),
        letter_sharding(letters, codes.shape),
        letter_sharding(letters, scales.shape),
    )
    return mesh, multiply_local, letter_sharding(out, result.shape), shardings


def scaled_product_rule(equation: str, dtype: Any, mesh: Any, values: Any, results: Any) -> str:
    """Return the sharding rule for XLA's partitioner: the equation's letters, and new ones for a scale's axes
    of size 1."""
    left, letters, out = split_equation(equation)
    rows = [f"row{i}" for i in range(values[0].rank - len(left))]
    scales = [f"one{i}" if n == 1 else letters[i] for i, n in enumerate(values[2].shape)]
    operands = [*rows, *left], [*letters], scales
    return ", ".join(map(" ".join, operands)) + " -> " + " ".join([*rows, *out])


partitioned_scaled_product.def_partition(partition_scaled_product, sharding_rule=scaled_product_rule)

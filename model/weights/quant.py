"""Weights in eight or four bits: a record in place of an array, with the same einsum.

Only weights are quantised; activations keep their dtype. Codes are widened where they are multiplied, which
XLA fuses into the product on accelerators. A scale of an output (or an input) multiplies the product (or the
input) instead.
"""

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Num

from ..gpus import may_use_kernel
from ..layers import einsum, ragged_dot
from ..sharding import is_manual_shard, is_multi_device, sharded_axes
from ..tree import paths_and_leaves
from . import expert_tiles, nibbles
from .schemes import SCHEMES, spread_blocks


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
    scheme: str = "int8"  # key in `SCHEMES`
    packed: int = -1

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the weight's shape, which may differ from the shape of its bytes."""
        shape = list(self.values.shape)
        shape[self.packed] *= SCHEMES[self.scheme].codes_per_byte
        return tuple(shape)

    @property
    def nibble_format(self) -> nibbles.NibbleFormat | None:
        """Return how GPU kernels widen 4-bit codes. None: codes have 8 bits."""
        return SCHEMES[self.scheme].nibble_format

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
            self.nibble_format is nibbles.INT4_NIBBLES
            and 0 < inputs == self.packed % len(shape) + 1
            and x.dtype.itemsize == 2
            and self.scales.dtype.name in nibbles.NIBBLE_SCALE_DTYPES
            and nibbles.has_group_scales(shape, scales, inputs)
            and nibbles.choose_nibble_tiles(prod(shape[:inputs]), prod(shape[inputs:]), prod(scales[:inputs]))
            is not None
            and not (is_manual_shard(self.values) and is_multi_device(self.values))
        )

    def group_size(self, inputs: int) -> int:
        """Return the number of inputs that share a scale. They are the first `inputs` axes."""
        return prod(self.shape[:inputs]) // prod(self.scales.shape[:inputs])

    @property
    def has_channel_scales(self) -> bool:
        """Return True if 8-bit codes have one scale for each number of an axis, or one for all."""
        sizes = zip(self.scales.shape, self.values.shape, strict=True)
        return SCHEMES[self.scheme].codes_per_byte == 1 and all(n in (1, size) for n, size in sizes)

    @property
    def has_lost_codes(self) -> bool:
        """Return True if a scale is 0 where 8-bit codes are not 0.

        False for scales of fewer exponents than float32: of numbers near 0 they may be 0 beside any codes.
        """
        is_checked = (
            SCHEMES[self.scheme].codes_per_byte == 1
            and self.zeros is None
            and self.scales.dtype.name in ("float32", "bfloat16")
            and has_zero_scale(self.scales)  # else the codes need not be read
        )
        return is_checked and bool(has_codes_of_scale_zero(self.values, self.scales))

    def ragged_dot(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], row_experts: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """Multiply consecutive rows by one expert's matrix each."""
        if not self.has_tile_kernel(rows.dtype):
            return ragged_dot_by_xla(rows, self, sizes, row_experts)
        return jax.lax.platform_dependent(
            rows, self, sizes, row_experts, cuda=ragged_dot_by_kernel, default=ragged_dot_by_xla
        )

    def has_tile_kernel(self, dtype: Any) -> bool:
        """Return True if a GPU kernel multiplies rows of this dtype by experts' codes."""
        matrices = expert_tiles.ExpertMatrices(self.values, self.scales, self.zeros)
        return expert_tiles.can_dequantise_experts(
            matrices, self.nibble_format, self.shape, self.packed, dtype
        )

    def dequantise(self, dtype: Any) -> Float[Array, "..."]:
        """Dequantise the weight to an array."""
        codes, scales = self.signed_codes().astype(jnp.float32), self.scales.astype(jnp.float32)
        return (codes * spread_blocks(scales, codes.shape)).astype(dtype)

    def signed_codes(self) -> Num[Array, "..."]:
        """Return the codes less their zeros, in the weight's shape."""
        scheme, codes = SCHEMES[self.scheme], self.values
        if scheme.codes_per_byte > 1:
            codes = nibbles.unpack_nibbles(codes, self.packed)
        return scheme.widen(codes, self.zeros)


def einsum_by_xla(x: Float[Array, "..."], w: Quantised, equation: str, dtype: Any) -> Float[Array, "..."]:
    """Compute the product with an array: the codes if scales can multiply the product or x, else the
    dequantised weight."""
    left, letters, out = split_equation(equation)
    scaled_letters = {letter for letter, size in zip(letters, w.scales.shape, strict=True) if size > 1}
    if scaled_letters <= set(out):
        operands = x, w.signed_codes(), w.scales, equation, dtype
        if w.has_channel_scales:
            return multiply_on_mesh(scaled_product, partitioned_scaled_product, *operands)
        return scaled_product(*operands)
    if scaled_letters <= set(left):
        x = (x.astype(jnp.float32) * align_scales(w.scales, letters, left, x.shape)).astype(x.dtype)
        return einsum(equation, x, w.signed_codes().astype(x.dtype), dtype)
    return einsum(equation, x, w.dequantise(x.dtype), dtype)


def multiply_on_mesh(
    multiply: Any, partitioned: Any, x: Any, codes: Any, scales: Any, equation: str, dtype: Any
) -> Float[Array, "..."]:
    """Compute a product that is `partitioned` if its weight is on several devices."""
    whole = partial(multiply, equation=equation, dtype=dtype)
    if not is_multi_device(codes) or is_manual_shard(codes):
        return whole(x, codes, scales)

    def multiply_split(x: Any, codes: Any, scales: Any) -> Float[Array, "..."]:
        return partitioned(x, codes, scales, equation, dtype)

    # a TPU's partitioner cannot call back into jax
    return jax.lax.platform_dependent(x, codes, scales, tpu=whole, default=multiply_split)


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
    """Multiply consecutive rows by one expert's matrix each, as an array: the codes if scales are of
    outputs."""
    if w.scales.shape[1] > 1:
        return ragged_dot(rows, w.dequantise(rows.dtype), sizes, row_experts)
    product = ragged_dot(rows, w.signed_codes().astype(rows.dtype), sizes, row_experts)
    scales = spread_blocks(w.scales[row_experts, 0].astype(jnp.float32), product.shape)
    return (product.astype(jnp.float32) * scales).astype(rows.dtype)


def ragged_dot_by_kernel(
    rows: Float[Array, "rows D"],
    w: Quantised,
    sizes: Int[Array, " E"],
    row_experts: Int[Array, " rows"] | None = None,
    interpret: bool = False,
    row_scales: Float[Array, "rows 1"] | None = None,
) -> Float[Array, "rows F"]:
    """Multiply consecutive rows by one expert's matrix each with the GPU kernel. It reads codes only.

    row_scales: scales of rows that are codes, or None.
    """
    matrices = expert_tiles.ExpertMatrices(w.values, w.scales, w.zeros)
    return expert_tiles.multiply_experts(rows, matrices, sizes, w.nibble_format, interpret, row_scales)


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


def quantise_weight(
    weight: Float[Array, "..."], contracted: tuple[int, ...], scheme: str
) -> Quantised | None:
    """Quantise a weight in one of `ENCODED_SCHEMES`. Returns None if the scheme cannot hold the weight.

    Products of the weight sum over the axes `contracted`, counted from the last.
    """
    encode = SCHEMES[scheme].encode
    assert encode is not None, f"weights are not encoded in {scheme}"
    encoded = encode(weight.astype(jnp.float32), contracted)
    return encoded and Quantised(encoded.values, encoded.scales, None, scheme, encoded.packed)


# ---------------------------------------------------------------- checks

LOST_CODES = "has scales of 0 beside codes that are not 0, expected scales other than 0"


def find_lost_codes(params: Any) -> str | None:
    """Return the path of the first weight of this process with `has_lost_codes`, or None."""
    weights = ((path, w) for path, w in paths_and_leaves(params, Quantised) if isinstance(w, Quantised))
    local = ((path, w) for path, w in weights if getattr(w.values, "is_fully_addressable", True))
    return next((path for path, w in local if w.has_lost_codes), None)


@jax.jit
def has_zero_scale(scales: Float[Array, "..."]) -> Bool[Array, ""]:
    """Return True if a number is 0."""
    return (scales == 0).any()


@jax.jit
def has_codes_of_scale_zero(values: Num[Array, "..."], scales: Float[Array, "..."]) -> Bool[Array, ""]:
    """Return True if a code is not 0, and its scale is."""
    return (spread_blocks(scales == 0, values.shape) & (values.astype(jnp.float32) != 0)).any()


# ---------------------------------------------------------------- on several devices


def partition_scaled_product(
    multiply: Any, equation: str, dtype: Any, mesh: Any, shapes: Any, result: Any
) -> Any:
    """Partition a product: each device scales its product with the codes that it holds.

    Sums over devices are then of `dtype`. XLA's partitioner would all-reduce unscaled sums in float32.
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
        product = multiply(x, codes, scales, equation, dtype)
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


def partition_product(multiply: Any) -> Any:
    """Return a product of x, codes, scales, an equation and a dtype that XLA's partitioner splits."""
    product = custom_partitioning(multiply, static_argnums=(3, 4))
    product.def_partition(partial(partition_scaled_product, multiply), sharding_rule=scaled_product_rule)
    return product


partitioned_scaled_product = partition_product(scaled_product)

"""Products of codes with codes (W8A8, W4A8): quantised weights whose products quantise their input too.

An input's row has one scale, which depends on that row alone. Products of int8 codes are added up in int32,
which is exact. So neither the number of rows, nor tiles, nor the number of devices changes a bit of them. On
a mesh XLA all-reduces the row's largest number and the integers, both of which have no order. Routed experts
whose inner dimension is split are the exception: each device scales its part of a row by itself.

Rows of experts have the codes of their tokens. Whatever multiplies them, their integers are those of `einsum`
with one expert, and `scale_code_sums` makes numbers of them in one order.

Of 4-bit codes the sums of groups of inputs are exact. Multiplied by the groups' scales they are added up in
order, in float32. So a number's bits depend neither on rows nor on tiles, but on a split of the inputs.
"""

from functools import partial, reduce
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from ..layers import einsum, prevent_fma, reorder_contraction
from ..tree import pytree, static
from .quant import (
    Quantised,
    align_scales,
    count_contracted_axes,
    multiply_on_mesh,
    partition_product,
    ragged_dot_by_kernel,
    split_equation,
)
from .schemes import ACTIVATION_SCHEMES, SCHEMES, ActivationScheme

GROUPS_AT_ONCE = 8  # groups whose sums are in memory at once, at most


class RowCodes(NamedTuple):
    """Rows as codes with a scale each.

    values: codes, in the rows' shape.
    scales: float32; each axis of a row has size 1.
    """

    values: Num[Array, "..."]
    scales: Float[Array, "..."]


@pytree
class InputQuantised:
    """A weight as codes, whose products quantise their input as well.

    weight: codes with a scale for each output, or one for all; of 4 bits with one for each group of inputs
        of an output.
    activations: key in `ACTIVATION_SCHEMES`.
    """

    weight: Quantised
    activations: str = static("int8")

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    @property
    def original(self) -> Quantised:
        """Return the weight whose products leave their input as it is."""
        return self.weight

    @property
    def ragged_dot_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the arrays that `ragged_dot` multiplies rows by."""
        return self.weight.ragged_dot_shapes

    def einsum(self, equation: str, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """Compute the product of x, whose last axes are the weight's first, in x's dtype or another."""
        inputs = count_contracted_axes(equation)
        assert inputs, f"{equation} does not sum over the weight's first axes"
        codes = quantise_rows(x, inputs, ACTIVATION_SCHEMES[self.activations])
        return multiply_codes(equation, codes, self.weight, dtype or x.dtype)

    def ragged_dot(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], row_experts: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """Multiply consecutive rows by one expert's matrix each."""
        codes = quantise_rows(rows, 1, ACTIVATION_SCHEMES[self.activations])
        by_xla, by_kernel = (
            partial(multiply, dtype=rows.dtype) for multiply in (multiply_ragged_codes, multiply_coded_tiles)
        )
        if not self.has_tile_kernel(rows.dtype):
            return by_xla(codes, self.weight, sizes, row_experts)
        return jax.lax.platform_dependent(
            codes, self.weight, sizes, row_experts, cuda=by_kernel, default=by_xla
        )

    def has_tile_kernel(self, dtype: Any) -> bool:
        """Return True if a GPU kernel multiplies the codes of rows of this dtype by experts' codes."""
        return self.weight.has_tile_kernel(dtype)


def quantise_rows(x: Float[Array, "..."], inputs: int, scheme: ActivationScheme) -> RowCodes:
    """Quantise rows of x, whose last `inputs` axes are one row: its largest magnitude becomes the largest
    code.

    Codes are products with one number for each row. A quotient would be rounded otherwise by some compilers.
    """
    x32, axes = widen_rounded(x), tuple(range(x.ndim - inputs, x.ndim))
    largest = jnp.max(jnp.abs(x32), axis=axes, keepdims=True)
    # a row of zeros, or of numbers whose inverse is infinite, has codes of 0
    inverse = jnp.where(largest > scheme.min_magnitude, scheme.max_code / largest, 0.0)
    scaled = x32 * inverse
    codes = jnp.round(scaled) if jnp.issubdtype(scheme.dtype, jnp.integer) else scaled
    return RowCodes(codes.astype(scheme.dtype), largest * np.float32(1 / scheme.max_code))


def widen_rounded(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Widen x to float32. 16-bit numbers stay rounded: XLA may drop their rounding (excess precision)."""
    if x.dtype.itemsize != 2:
        return x.astype(jnp.float32)
    kind = jnp.finfo(x.dtype)
    return jax.lax.reduce_precision(x.astype(jnp.float32), kind.nexp, kind.nmant)


def multiply_codes(equation: str, x: RowCodes, w: Quantised, dtype: Any) -> Float[Array, "..."]:
    """Compute the product of rows and a weight, both in codes. Sums are scaled by the output or by groups
    of inputs, then by the row, in float32."""
    _, letters, out = split_equation(equation)
    inputs = count_contracted_axes(equation)
    row_scales = x.scales.reshape(*x.scales.shape[: x.scales.ndim - inputs], *(1,) * (len(letters) - inputs))
    if SCHEMES[w.scheme].codes_per_byte > 1:
        product = sum_scaled_groups(x.values, w, inputs, letters[inputs:])
        return prevent_fma(product * row_scales).astype(dtype)
    sums = sum_code_products(equation, x.values, w.values)
    return scale_code_sums(sums, align_scales(w.scales, letters, out, sums.shape), row_scales, dtype)


def sum_scaled_groups(x: Int[Array, "..."], w: Quantised, inputs: int, outputs: str) -> Float[Array, "..."]:
    """Add up products of codes by groups of inputs. The weight's outputs have the letters `outputs`."""
    group, size = w.group_size(inputs), w.shape[inputs:]
    operands = (
        x.reshape(*x.shape[: x.ndim - inputs], -1, group),
        w.signed_codes().reshape(-1, group, *size),
        w.scales.reshape(-1, 1, *size),
    )
    equation = f"...GK,GK{outputs}->...{outputs}"
    return multiply_on_mesh(add_scaled_groups, partitioned_groups, *operands, equation, jnp.float32)


def add_scaled_groups(
    x: Int[Array, "... G K"],
    codes: Int[Array, "G K ..."],
    scales: Float[Array, "G 1 ..."],
    equation: str,
    dtype: Any,
) -> Float[Array, "..."]:
    """Add up each group's products, exactly, and then the groups, each times its scale: to 0, in order."""
    (G, K, *size), rows = codes.shape, x.shape[:-2]
    together = next(n for n in range(min(G, GROUPS_AT_ONCE), 0, -1) if G % n == 0)
    steps = G // together, together
    parts = (
        jnp.moveaxis(x.reshape(prod(rows), *steps, K), 0, 2),
        codes.reshape(*steps, K, prod(size)),
        scales.astype(jnp.float32).reshape(*steps, 1, prod(size)),
    )

    def add_part(total: Float[Array, "M F"], part: Any) -> tuple[Float[Array, "M F"], None]:
        sums = jnp.einsum("gmk,gkf->gmf", *part[:2], preferred_element_type=jnp.int32)
        return reduce(jnp.add, prevent_fma(sums.astype(jnp.float32) * part[2]), total), None

    total, _ = jax.lax.scan(add_part, jnp.zeros((prod(rows), prod(size)), jnp.float32), parts)
    return total.reshape(*rows, *size).astype(dtype)


partitioned_groups = partition_product(add_scaled_groups)


def multiply_ragged_codes(
    rows: RowCodes, w: Quantised, sizes: Int[Array, " E"], row_experts: Int[Array, " rows"], dtype: Any
) -> Float[Array, "rows F"]:
    """Multiply consecutive rows by one expert's matrix each, both in codes."""
    is_integer = jnp.issubdtype(w.values.dtype, jnp.integer)
    operand, total = (w.values.dtype, jnp.int32) if is_integer else (jnp.bfloat16, jnp.float32)
    sums = jax.lax.ragged_dot(
        rows.values.astype(operand), w.values.astype(operand), sizes, preferred_element_type=total
    )
    return scale_code_sums(sums, w.scales[row_experts, 0].astype(jnp.float32), rows.scales, dtype)


def multiply_coded_tiles(
    rows: RowCodes,
    w: Quantised,
    sizes: Int[Array, " E"],
    row_experts: Int[Array, " rows"],
    dtype: Any,
    interpret: bool = False,
) -> Float[Array, "rows F"]:
    """Compute `multiply_ragged_codes` by the GPU kernel, which takes codes as numbers of 16 bits."""
    return ragged_dot_by_kernel(rows.values.astype(dtype), w, sizes, row_experts, interpret, rows.scales)


def scale_code_sums(
    sums: Num[Array, "..."], output_scales: Float[Array, "..."], row_scales: Float[Array, "..."], dtype: Any
) -> Float[Array, "..."]:
    """Scale sums of products of codes by the output, then by the row, in float32."""
    return prevent_fma(sums.astype(jnp.float32) * output_scales * row_scales).astype(dtype)


def sum_code_products(equation: str, x: Num[Array, "..."], w: Num[Array, "..."]) -> Num[Array, "..."]:
    """Add up products of codes: of integers in int32, of floats in float32."""
    if jnp.issubdtype(w.dtype, jnp.integer):
        return jnp.einsum(reorder_contraction(equation), x, w, preferred_element_type=jnp.int32)

    def multiply(x: Num[Array, "..."], w: Num[Array, "..."]) -> Float[Array, "..."]:
        # the highest precision keeps cuBLAS from sums of fewer bits
        return jnp.einsum(
            reorder_contraction(equation), x, w, precision="highest", preferred_element_type=jnp.float32
        )

    def multiply_widened(x: Num[Array, "..."], w: Num[Array, "..."]) -> Float[Array, "..."]:
        return einsum(equation, x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), jnp.float32)

    return jax.lax.platform_dependent(x, w, cuda=multiply, default=multiply_widened)

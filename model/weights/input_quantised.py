"""Products of codes with codes (W8A8): quantised weights whose products quantise their input too.

An input's row has one scale, which depends on that row alone. Products of int8 codes are added up in int32,
which is exact. So neither the number of rows, nor tiles, nor the number of devices changes a bit of them. On
a mesh XLA all-reduces the row's largest number and the integers, both of which have no order. Experts whose
inner dimension is split are the exception: each device scales its part of a row by itself.

Rows of experts have the codes of their tokens. Whatever multiplies them, their integers are those of `einsum`
with one expert, and `scale_sums` makes numbers of them in one order.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from ..layers import einsum, prevent_fma, reorder_contraction
from ..tree import pytree, static
from .quant import Quantised, align_scales, count_contracted_axes, ragged_dot_by_kernel, split_equation
from .schemes import ACTIVATION_SCHEMES, ActivationScheme


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

    weight: codes with a scale for each output, or one for all.
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
    x32, axes = x.astype(jnp.float32), tuple(range(x.ndim - inputs, x.ndim))
    if x.dtype.itemsize == 2:  # else XLA may drop the rounding of x to 16 bits (excess precision)
        kind = jnp.finfo(x.dtype)
        x32 = jax.lax.reduce_precision(x32, kind.nexp, kind.nmant)
    largest = jnp.max(jnp.abs(x32), axis=axes, keepdims=True)
    # a row of zeros, or of numbers whose inverse is infinite, has codes of 0
    inverse = jnp.where(largest > scheme.min_magnitude, scheme.max_code / largest, 0.0)
    scaled = x32 * inverse
    codes = jnp.round(scaled) if jnp.issubdtype(scheme.dtype, jnp.integer) else scaled
    return RowCodes(codes.astype(scheme.dtype), largest * np.float32(1 / scheme.max_code))


def multiply_codes(equation: str, x: RowCodes, w: Quantised, dtype: Any) -> Float[Array, "..."]:
    """Compute the product of rows and a weight, both in codes."""
    _, letters, out = split_equation(equation)
    sums, inputs = sum_code_products(equation, x.values, w.values), count_contracted_axes(equation)
    row_scales = x.scales.reshape(*x.scales.shape[: x.scales.ndim - inputs], *(1,) * (len(letters) - inputs))
    return scale_sums(sums, align_scales(w.scales, letters, out, sums.shape), row_scales, dtype)


def multiply_ragged_codes(
    rows: RowCodes, w: Quantised, sizes: Int[Array, " E"], row_experts: Int[Array, " rows"], dtype: Any
) -> Float[Array, "rows F"]:
    """Multiply consecutive rows by one expert's matrix each, both in codes."""
    is_integer = jnp.issubdtype(w.values.dtype, jnp.integer)
    operand, total = (w.values.dtype, jnp.int32) if is_integer else (jnp.bfloat16, jnp.float32)
    sums = jax.lax.ragged_dot(
        rows.values.astype(operand), w.values.astype(operand), sizes, preferred_element_type=total
    )
    return scale_sums(sums, w.scales[row_experts, 0].astype(jnp.float32), rows.scales, dtype)


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


def scale_sums(
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

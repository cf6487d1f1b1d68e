"""Products of codes with codes (W8A8): quantised weights whose products quantise their input too.

An input's row has one scale, which depends on that row alone. Products of int8 codes are added up in int32,
which is exact. So neither the number of rows, nor tiles, nor the number of devices changes a bit of them. On
a mesh XLA all-reduces the row's largest number and the integers, both of which have no order. A shared expert
whose inner dimension is split is the exception: each device scales its part of a row by itself.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Num

from ..layers import einsum, prevent_fma, reorder_contraction
from ..tree import pytree, static
from .quant import Quantised, align_scales, count_contracted_axes, split_equation
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
        """Multiply consecutive rows by one expert's matrix each. Rows of experts are not quantised."""
        return self.weight.ragged_dot(rows, sizes, row_experts)


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
    """Compute the product of rows and a weight, both in codes. Sums are scaled by the output, then by the
    row, in float32."""
    _, letters, out = split_equation(equation)
    sums = sum_code_products(equation, x.values, w.values).astype(jnp.float32)
    inputs = count_contracted_axes(equation)
    row_scales = x.scales.reshape(*x.scales.shape[: x.scales.ndim - inputs], *(1,) * (len(letters) - inputs))
    product = sums * align_scales(w.scales, letters, out, sums.shape) * row_scales
    return prevent_fma(product).astype(dtype)


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

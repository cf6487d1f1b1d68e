"""Codes with their inputs side by side, as an NVIDIA GPU multiplies them by codes (W8A8).

Tensor cores take 8-bit operands in that order only. XLA would turn the weight over in every step.
"""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ...gpus import may_use_kernel
from ...layers import einsum, prevent_fma
from ...tree import map_by_path, pytree, static
from ..compression.compress import CONTRACTED_AXES, place_replacement
from ..input_quantised import InputQuantised, RowCodes, quantise_rows, sum_code_products
from ..quant import Quantised
from ..schemes import ACTIVATION_SCHEMES
from ..transposed import abstract_like
from .code_tiles import (
    CODE_PRODUCT_KERNEL,
    MAX_CODED_ROW,
    MAX_PRODUCT_ROWS,
    ROW_CODES_KERNEL,
    CodeMatrix,
    RowFunction,
    choose_code_tiles,
    multiply_by_kernel,
    quantise_rows_by_kernel,
    scale_sums,
)

T = TypeVar("T")


@pytree
class TransposedCodes(InputQuantised):
    """A weight [*inputs, *outputs] as codes [outputs, inputs], whose products quantise their input as well.

    weight: a `CodeMatrix`.
    scheme: scheme of the weight's codes.
    scale_shape: shape of the weight's scales, in the weight's axes.
    """

    weight: Any
    inputs: tuple[int, ...] = static(())
    outputs: tuple[int, ...] = static(())
    scheme: str = static("int8")
    scale_shape: tuple[int, ...] = static(())

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.inputs, *self.outputs)

    @property
    def original(self) -> Quantised:
        """Return the weight, a copy, whose products leave their input as it is."""
        values, scales = self.weight
        if isinstance(values, jax.ShapeDtypeStruct):
            return Quantised(
                abstract_like(values, self.shape), abstract_like(scales, self.scale_shape), None, self.scheme
            )
        return Quantised(values.T.reshape(self.shape), scales.reshape(self.scale_shape), None, self.scheme)

    @property
    def ragged_dot_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the arrays that `ragged_dot` multiplies rows by."""
        return (self.shape,)

    def einsum(self, equation: str, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """Compute the product of x, whose last axes are the inputs. The equation ends in the outputs."""
        return multiply_coded_rows((x,), [self], dtype or x.dtype)[0]

    def mapped_einsum(
        self, equation: str, function: RowFunction, inputs: Sequence[Float[Array, "..."]]
    ) -> Float[Array, "..."]:
        """Compute the product of a function of arrays, which the kernel that quantises it computes too."""
        return multiply_coded_rows(inputs, [self], inputs[0].dtype, function)[0]

    def joint_einsum(
        self, equation: str, x: Float[Array, "..."], others: Sequence[Any]
    ) -> list[Float[Array, "..."]]:
        """Return the products of x with this weight and with the others. x is quantised once."""
        if all(isinstance(w, TransposedCodes) and w.activations == self.activations for w in others):
            return multiply_coded_rows((x,), [self, *others], x.dtype)
        return [einsum(equation, x, w) for w in (self, *others)]

    def ragged_dot(self, rows: Any, sizes: Any, row_experts: Any) -> Float[Array, "rows F"]:
        """Multiply consecutive rows by one expert's matrix each. Rows of experts are not quantised."""
        return self.original.ragged_dot(rows, sizes, row_experts)


def return_row(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Return a row as it is."""
    return x


def multiply_coded_rows(
    inputs: Sequence[Float[Array, "..."]],
    weights: Sequence[TransposedCodes],
    dtype: Any,
    function: RowFunction = return_row,
) -> list[Float[Array, "..."]]:
    """Return the products of rows with weights of the same inputs, by kernels where they may be used.

    function: makes the rows of the inputs, entry by entry.
    """
    first, x = weights[0], inputs[0]
    before = x.shape[: x.ndim - len(first.inputs)]
    flat = tuple(x.reshape(prod(before), prod(first.inputs)) for x in inputs)
    rows = quantise_matrix_rows(flat, function, first.activations)
    products = multiply_row_codes(rows, tuple(w.weight for w in weights), dtype)
    return [product.reshape(*before, *w.outputs) for product, w in zip(products, weights, strict=True)]


def quantise_matrix_rows(
    inputs: tuple[Float[Array, "rows D"], ...], function: RowFunction, activations: str
) -> RowCodes:
    """Quantise rows that a function makes of arrays, in one of `ACTIVATION_SCHEMES`."""

    def default(inputs: tuple[Float[Array, "rows D"], ...]) -> RowCodes:
        return quantise_rows(function(*inputs), 1, ACTIVATION_SCHEMES[activations])

    if activations != "int8" or not has_row_codes_kernel(inputs[0]) or not may_use_kernel(ROW_CODES_KERNEL):
        return default(inputs)
    kernel = partial(quantise_rows_by_kernel, function=function)
    return jax.lax.platform_dependent(inputs, cuda=kernel, default=default)


def has_row_codes_kernel(x: Float[Array, "rows D"]) -> bool:
    """Return True if a GPU kernel quantises rows like these to int8."""
    return x.dtype.itemsize == 2 and x.shape[1] <= MAX_CODED_ROW


def multiply_row_codes(
    rows: RowCodes, matrices: tuple[CodeMatrix, ...], dtype: Any
) -> list[Float[Array, "rows _"]]:
    """Multiply rows by matrices, all in codes."""
    default = partial(multiply_codes_by_xla, dtype=dtype)
    if not has_code_kernel(rows, matrices) or not may_use_kernel(CODE_PRODUCT_KERNEL):
        return default(rows, matrices)
    kernel = partial(multiply_by_kernel, dtype=dtype)
    return jax.lax.platform_dependent(rows, matrices, cuda=kernel, default=default)


def has_code_kernel(rows: RowCodes, matrices: Sequence[CodeMatrix]) -> bool:
    """Return True if a GPU kernel multiplies these rows by these matrices."""
    (M, D), columns = rows.values.shape, [len(matrix.values) for matrix in matrices]
    is_int8 = {rows.values.dtype, *(matrix.values.dtype for matrix in matrices)} == {jnp.dtype(jnp.int8)}
    return is_int8 and M <= MAX_PRODUCT_ROWS and choose_code_tiles(M, D, columns) is not None


def multiply_codes_by_xla(
    rows: RowCodes, matrices: Sequence[CodeMatrix], dtype: Any
) -> list[Float[Array, "rows _"]]:
    """Multiply rows by matrices, as `multiply_codes`."""

    def multiply(matrix: CodeMatrix) -> Float[Array, "rows F"]:
        sums = sum_code_products("td,fd->tf", rows.values, matrix.values)
        return prevent_fma(scale_sums(sums, matrix.scales, rows.scales)).astype(dtype)

    return [multiply(matrix) for matrix in matrices]


# ---------------------------------------------------------------- trees


def transpose_code_params(params: T, donate: bool = False) -> T:
    """Return parameters, or ShapeDtypeStructs, with each `InputQuantised` as `TransposedCodes`.

    With `donate` each weight is deleted when its copy is ready.
    """

    def transpose_leaf(path: str, weight: Any) -> Any:
        if not isinstance(weight, InputQuantised) or isinstance(weight, TransposedCodes):
            return weight
        inputs = len(CONTRACTED_AXES[path.rpartition(".")[2]])
        return place_replacement(weight, transpose_codes(weight, inputs), donate)

    return map_by_path(params, InputQuantised, transpose_leaf)


def transpose_codes(weight: InputQuantised, inputs: int) -> TransposedCodes:
    """Transpose codes, arrays or ShapeDtypeStructs, whose product sums over their first axes."""
    values, scales, shape = weight.weight.values, weight.weight.scales, weight.shape
    D, F, count = prod(shape[:inputs]), prod(shape[inputs:]), prod(scales.shape)
    assert scales.shape[inputs:] in (shape[inputs:], (1,) * (len(shape) - inputs)), scales.shape
    if isinstance(values, jax.ShapeDtypeStruct):
        matrix = CodeMatrix(abstract_like(values, (F, D)), abstract_like(scales, (count,)))
    else:
        matrix = CodeMatrix(values.reshape(D, F).T, scales.reshape(count))
    return TransposedCodes(
        matrix, weight.activations, shape[:inputs], shape[inputs:], weight.weight.scheme, scales.shape
    )

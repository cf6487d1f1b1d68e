"""Weights in panels, the layout of duetto's own CPU kernels (`cpu_kernels`), and their products.

A kernel adds up each number in one order for every number of rows. So a row's bits are the same in every
step. XLA's products on a CPU choose their order by the rows, and repack a 16-bit weight in each call.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int, Num

from ....cpu_kernels import library
from ...layers import einsum, ragged_dot
from ...sharding import fit_sharding
from ...tree import pytree, static
from ..input_quantised import InputQuantised
from ..nibbles import pack_nibbles, unpack_nibbles
from ..quant import Quantised
from ..schemes import SCHEMES, spread_blocks
from . import bf12

T = TypeVar("T")
PANEL_COLUMNS = 32  # outputs of a panel, as in the kernels
PANEL_DTYPES = jnp.bfloat16, jnp.float32  # dtypes of weights, and of products
NO_SCALES, NO_SIZES = np.zeros((0, 0, 0), np.float32), np.zeros(0, np.int32)


@dataclass(frozen=True)
class CodesForm:
    """Description of a packed `Quantised`, apart from its arrays. Shapes lack the experts' axis.

    scheme: scheme of the codes.
    packed: axis along which a byte holds two codes.
    scales: shape of the scales.
    dtype: dtype of the scales.
    activations: "int8" if kernels multiply codes by rows of x in 8-bit codes, or None.
    """

    scheme: str
    packed: int
    scales: tuple[int, ...]
    dtype: str
    activations: str | None = None


@pytree
class Packed:
    """A weight [*inputs, *outputs] in panels of PANEL_COLUMNS outputs. The last panel is padded with zeros.

    array: [panels, inputs, PANEL_COLUMNS]; in bfloat16 and int8 [panels, pairs of inputs, PANEL_COLUMNS, 2];
        of 4-bit codes [panels, pairs of inputs, PANEL_COLUMNS], with a pair in a byte. For activations in
        codes [panels, fours or eights of inputs, PANEL_COLUMNS, 4], with inputs i and i + 4 of eight 4-bit
        codes in a byte. Some kernels read bfloat16 in the form of `bf12`. Experts' weights have one more
        axis, before all others.
    scales: of codes, [panels, groups of inputs, PANEL_COLUMNS], or None.
    inputs: sizes of the axes that a product sums over.
    outputs: sizes of the other axes.
    target: the kernel's name for XLA.
    codes: description of the codes, or None.
    is_head: True if the weight is an output matrix [outputs, inputs].
    is_tied: True if it is a copy of the embedding. In codes it is then [inputs, outputs].
    """

    array: Any
    scales: Any = None
    inputs: tuple[int, ...] = static(())
    outputs: tuple[int, ...] = static(())
    target: str = static("")
    codes: CodesForm | None = static(None)
    is_head: bool = static(False)
    is_tied: bool = static(False)

    @property
    def ragged_dot_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the arrays that `ragged_dot` multiplies rows by."""
        return ((*self.expert_shape, *self.inputs, *self.outputs),)

    @property
    def expert_shape(self) -> tuple[int, ...]:
        """Return the number of experts as the first sizes of a shape: (E,), or ()."""
        has_4_axes = self.activations or self.array.dtype in (jnp.bfloat16, jnp.uint16, jnp.int8)
        return self.array.shape[: self.array.ndim - (4 if has_4_axes else 3)]

    @property
    def original(self) -> Any:
        """Return the weight before packing: an array that is a copy, a `Quantised`, or one of
        ShapeDtypeStructs."""
        restore = each_from_panels if self.expert_shape else one_from_panels
        if isinstance(self.array, jax.ShapeDtypeStruct):
            return with_sharding(jax.eval_shape(restore, self), self.array.sharding)
        return restore(self)

    @property
    def activations(self) -> str | None:
        """Return the scheme of the codes that kernels make of x, or None."""
        return self.codes and self.codes.activations

    @property
    def xla_weight(self) -> Any:
        """Return the weight that XLA multiplies in the same way."""
        return InputQuantised(self.original, self.activations) if self.activations else self.original

    def einsum(self, equation: str, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """Compute the product of x, whose last axes are the inputs. The equation ends in the outputs.

        XLA computes it if no kernel is for these dtypes.
        """
        dtype = dtype or x.dtype
        if not self.can_multiply(x.dtype, dtype):
            return einsum(equation, x, self.xla_weight, dtype)
        return multiply_panels([self], x, NO_SIZES, dtype)[0]

    def joint_einsum(
        self, equation: str, x: Float[Array, "..."], others: Sequence[Any]
    ) -> list[Float[Array, "..."]]:
        """Return the products of x with this weight and with the others, in one call of the kernels if they
        take all."""
        weights = [self, *others]
        if not all(isinstance(w, Packed) and w.can_multiply(x.dtype, x.dtype) for w in weights):
            return [einsum(equation, x, w) for w in weights]
        return multiply_panels(weights, x, NO_SIZES, x.dtype)

    def ragged_dot(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], row_experts: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """Multiply consecutive rows by one expert's matrix each. Rows without an expert give zeros."""
        if not self.can_multiply(rows.dtype, rows.dtype):
            return ragged_dot(rows, self.xla_weight, sizes, row_experts)
        return multiply_panels([self], rows, sizes, rows.dtype)[0]

    def can_multiply(self, *dtypes: Any) -> bool:
        """Return True if a kernel takes x of the first dtype, and makes products of the second."""
        x, out_dtype = dtypes
        weight_dtype = jnp.bfloat16 if self.array.dtype == jnp.uint16 else self.array.dtype
        return out_dtype in PANEL_DTYPES and (x in PANEL_DTYPES if self.codes else x == weight_dtype)


def multiply_panels(
    weights: Sequence[Packed], x: Float[Array, "..."], sizes: Any, dtype: Any
) -> list[Float[Array, "..."]]:
    """Compute the products of x with all weights in one call of the kernels. x's last axes are their
    inputs."""
    first = weights[0]
    rows = x.shape[: x.ndim - len(first.inputs)]
    out_shapes = [jax.ShapeDtypeStruct((*rows, prod(w.outputs)), dtype) for w in weights]
    call = jax.ffi.ffi_call(first.target, out_shapes, vmap_method="sequential")
    operands = [(w.array, NO_SCALES if w.scales is None else w.scales) for w in weights]
    outputs = call(x.reshape(*rows, prod(first.inputs)), sizes, *chain.from_iterable(operands))
    return [y.reshape(*rows, *w.outputs) for y, w in zip(outputs, weights, strict=True)]


def panels_from_matrix(
    matrix: Num[Array, "outputs inputs"], adjacent: int | None = None
) -> Num[Array, "panels depth ..."]:
    """Lay out a matrix [outputs, inputs] in panels, padded with zeros.

    adjacent: number of inputs of an output that lie side by side: by default 1 in float32, otherwise 2.
    """
    adjacent = adjacent or (1 if matrix.dtype == jnp.float32 else 2)
    panels, depth = -(-len(matrix) // PANEL_COLUMNS), -(-matrix.shape[1] // adjacent)
    padding = panels * PANEL_COLUMNS - len(matrix), depth * adjacent - matrix.shape[1]
    padded = jnp.pad(matrix, [(0, n) for n in padding])
    panels = padded.reshape(panels, PANEL_COLUMNS, depth, adjacent).transpose(0, 2, 1, 3)
    return panels if adjacent > 1 else panels[..., 0]


def panels_from_codes(
    quantised: Quantised, inputs: int, activations: str | None = None
) -> tuple[Num[Array, "panels depth ..."], Float[Array, "panels groups C"]]:
    """Lay out codes and scales in panels, of a weight whose product sums over its first axes."""
    outputs = quantised.shape[inputs:]
    is_narrow = SCHEMES[quantised.scheme].codes_per_byte > 1
    codes = unpack_nibbles(quantised.values, quantised.packed) if is_narrow else quantised.values
    adjacent = (8 if is_narrow else 4) if activations else None
    panels = panels_from_matrix(codes.reshape(-1, prod(outputs)).T, adjacent)
    if is_narrow and activations:  # the first four inputs of eight in the low bits
        panels = panels.reshape(*panels.shape[:-1], 2, 4).swapaxes(-1, -2)
    is_kept = is_narrow and quantised.scales.dtype == jnp.bfloat16
    scales = quantised.scales if is_kept else quantised.scales.astype(jnp.float32)
    scales = spread_blocks(scales, (*scales.shape[:inputs], *outputs)).reshape(-1, prod(outputs))
    scales = jnp.pad(scales, ((0, 0), (0, -scales.shape[1] % PANEL_COLUMNS)))
    scales = jnp.moveaxis(scales.reshape(len(scales), -1, PANEL_COLUMNS), 1, 0)
    return pack_nibbles(panels, -1)[..., 0] if is_narrow else panels, scales


def weight_from_panels(w: Packed) -> Any:
    """Return the weight, or one expert's weight, before packing."""
    form, K, N = w.codes, prod(w.inputs), prod(w.outputs)
    is_narrow = form is not None and SCHEMES[form.scheme].codes_per_byte > 1
    panels = unpack_nibbles(w.array[..., None], -1) if is_narrow else w.array
    if is_narrow and w.activations:
        panels = panels.swapaxes(-1, -2).reshape(*panels.shape[:-2], 8)
    if panels.dtype == jnp.uint16:
        panels = bf12.decode_bf12(panels)
    matrix = jnp.moveaxis(panels, 2, 1).reshape(panels.shape[0] * PANEL_COLUMNS, -1)[:N, :K]
    shape = (*w.outputs, *w.inputs) if w.is_head else (*w.inputs, *w.outputs)
    array = (matrix if w.is_head else matrix.T).reshape(shape)
    if form is None:
        return array
    whole = (*form.scales[: len(w.inputs)], *w.outputs)
    scales = jnp.moveaxis(w.scales, 0, 1).reshape(w.scales.shape[1], -1)[:, :N].reshape(whole)
    first_of_each = tuple(slice(None, None, n // m) for n, m in zip(whole, form.scales, strict=True))
    values = pack_nibbles(array, form.packed) if is_narrow else array
    return Quantised(values, scales[first_of_each].astype(form.dtype), None, form.scheme, form.packed)


to_panels = jax.jit(panels_from_matrix)
to_panels_each = jax.jit(jax.vmap(panels_from_matrix))
one_from_panels, each_from_panels = jax.jit(weight_from_panels), jax.jit(jax.vmap(weight_from_panels))
# Layers share one trace.
to_code_panels = jax.jit(panels_from_codes, static_argnames=("inputs", "activations"))
to_code_panels_each = jax.jit(
    lambda codes, activations: jax.vmap(partial(panels_from_codes, inputs=1, activations=activations))(codes),
    static_argnames="activations",
)


def with_sharding(shapes: T, sharding: Any) -> T:
    """Return ShapeDtypeStructs with a sharding, fitted to their shapes."""

    def add_sharding(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding and fit_sharding(sharding, x.shape))

    return jax.tree.map(add_sharding, shapes)


def apply_or_eval_shape(f: Any, weight: Any) -> Any:
    """Apply f to a weight, by `jax.eval_shape` if its arrays are ShapeDtypeStructs."""
    first = jax.tree.leaves(weight)[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return with_sharding(jax.eval_shape(f, weight), first.sharding)
    return f(weight)


def maybe_encode_bf12(panels: Any, target: str) -> Any:
    """Encode panels in 12 bits, if the kernels read these. Traced panels keep 16, with equal products."""
    if isinstance(panels, Tracer) or not library.supports_bf12(target):
        return panels
    return bf12.encode_bf12(panels) if bf12.can_encode_bf12(panels) else panels


def pack_matrix(
    matrix: Any,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    target: str,
    is_head: bool = False,
) -> Packed:
    """Pack a matrix [outputs, inputs]."""
    panels = apply_or_eval_shape(to_panels, matrix)
    return Packed(maybe_encode_bf12(panels, target), None, inputs, outputs, target, is_head=is_head)


def pack_codes(quantised: Quantised, inputs: int, target: str, activations: str | None = None) -> Packed:
    """Pack codes whose product sums over their first axes, for activations in x's dtype or in codes."""
    assert activations in (None, "int8")
    layout = partial(to_code_panels, inputs=inputs, activations=activations)
    array, scales = apply_or_eval_shape(layout, quantised)
    form = CodesForm(
        quantised.scheme,
        quantised.packed,
        quantised.scales.shape,
        quantised.scales.dtype.name,
        activations,
    )
    return Packed(array, scales, quantised.shape[:inputs], quantised.shape[inputs:], target, form)


def pack_experts(weight: Any, target: str) -> Packed:
    """Pack matrices [E, inputs, outputs], or their codes."""
    _, K, N = weight.shape
    activations = weight.activations if isinstance(weight, InputQuantised) else None
    weight = weight.weight if isinstance(weight, InputQuantised) else weight
    if not isinstance(weight, Quantised):
        panels = apply_or_eval_shape(lambda w: to_panels_each(jnp.swapaxes(w, 1, 2)), weight)
        return Packed(maybe_encode_bf12(panels, target), None, (K,), (N,), target)
    layout = partial(to_code_panels_each, activations=activations)
    array, scales = apply_or_eval_shape(layout, weight)
    form = CodesForm(
        weight.scheme, weight.packed, weight.scales.shape[1:], weight.scales.dtype.name, activations
    )
    return Packed(array, scales, (K,), (N,), target, form)

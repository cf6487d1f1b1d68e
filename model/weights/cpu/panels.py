"""Weights in panels, as duetto's own CPU kernels read them (`cpu_kernels`), and their products.

A kernel adds up each number in one order, whatever the number of rows: a row's bits are the same in every
step. XLA's products on a CPU choose their order by the rows, and pack a weight of 16 bits in each call.
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
from jaxtyping import Array, Float, Int, Num

from ....cpu_kernels import library
from ...layers import einsum, ragged_product
from ...sharding import fitted
from ...tree import pytree, static
from .. import quant
from ..quant import Quantised
from . import bf12

T = TypeVar("T")
COLUMNS = 32  # outputs of a panel, as in the kernels
OUTPUTS = jnp.bfloat16, jnp.float32  # dtypes of weights, and of products
NO_SCALES, NO_SIZES = np.zeros((0, 0, 0), np.float32), np.zeros(0, np.int32)


@dataclass(frozen=True)
class CodesForm:
    """Rest of a `Quantised` besides its codes: its scheme and packed axis, its scales' shape and dtype,
    without the experts' axis."""

    scheme: quant.Scheme
    packed: int
    scales: tuple[int, ...]
    dtype: str


@pytree
class Packed:
    """A weight [*inputs, *outputs] in panels of COLUMNS outputs: [panels, inputs, COLUMNS], or in bfloat16
    and int8 [panels, pairs of inputs, COLUMNS, 2]; the last ones are filled up with zeros. A byte of 4-bit
    codes holds a pair: [panels, pairs of inputs, COLUMNS]. Some kernels read bfloat16 as `bf12` has it.

    Experts' weights have one axis more, before all others. scales: [panels, groups of inputs, COLUMNS], of
    codes, whose form is `codes`. target: the kernel's name for XLA. is_head: the weight was an output matrix
    [outputs, inputs]; is_tied: it is a copy of the embedding; in codes it is one
    [inputs, outputs].
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
    def factors(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays that `ragged` multiplies rows with."""
        return ((*self.experts, *self.inputs, *self.outputs),)

    @property
    def experts(self) -> tuple[int, ...]:
        """Their number, or nothing."""
        is_pair = self.array.dtype in (jnp.bfloat16, jnp.uint16, jnp.int8)
        return self.array.shape[: self.array.ndim - (4 if is_pair else 3)]

    @property
    def whole(self) -> Any:
        """The weight as it was: an array that is a copy, a `Quantised`, or one of ShapeDtypeStructs."""
        restored = each_from_panels if self.experts else one_from_panels
        if isinstance(self.array, jax.ShapeDtypeStruct):
            return shaped(jax.eval_shape(restored, self), self.array.sharding)
        return restored(self)

    def einsum(self, equation: str, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """The product of x, whose last axes are the inputs, by an equation that ends in the outputs; XLA's
        product where no kernel is of these dtypes."""
        dtype = dtype or x.dtype
        if not self.multiplies(x.dtype, dtype):
            return einsum(equation, x, self.whole, dtype)
        return products([self], x, NO_SIZES, dtype)[0]

    def joint_einsum(
        self, equation: str, x: Float[Array, "..."], others: Sequence[Any]
    ) -> list[Float[Array, "..."]]:
        """The products of x with this weight and with the others, all by one call of the kernels if it takes
        them."""
        weights = [self, *others]
        if not all(isinstance(w, Packed) and w.multiplies(x.dtype, x.dtype) for w in weights):
            return [einsum(equation, x, w) for w in weights]
        return products(weights, x, NO_SIZES, x.dtype)

    def ragged(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], owner: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """Products of consecutive rows with one expert's weights each; zeros of rows that no expert has."""
        if not self.multiplies(rows.dtype, rows.dtype):
            return ragged_product(rows, self.whole, sizes, owner)
        return products([self], rows, sizes, rows.dtype)[0]

    def multiplies(self, *dtypes: Any) -> bool:
        """True if a kernel takes x, and makes products, of these dtypes."""
        x, made = dtypes
        own = jnp.bfloat16 if self.array.dtype == jnp.uint16 else self.array.dtype
        return made in OUTPUTS and (x in OUTPUTS if self.codes else x == own)


def products(
    weights: Sequence[Packed], x: Float[Array, "..."], sizes: Any, dtype: Any
) -> list[Float[Array, "..."]]:
    """Products of x, whose last axes are the inputs of all weights, in one call of the kernels."""
    first = weights[0]
    rows = x.shape[: x.ndim - len(first.inputs)]
    made = [jax.ShapeDtypeStruct((*rows, prod(w.outputs)), dtype) for w in weights]
    call = jax.ffi.ffi_call(first.target, made, vmap_method="sequential")
    each = [(w.array, NO_SCALES if w.scales is None else w.scales) for w in weights]
    found = call(x.reshape(*rows, prod(first.inputs)), sizes, *chain.from_iterable(each))
    return [y.reshape(*rows, *w.outputs) for y, w in zip(found, weights, strict=True)]


def panels_of(matrix: Num[Array, "outputs inputs"]) -> Num[Array, "panels depth ..."]:
    panels, pair = -(-len(matrix) // COLUMNS), 1 if matrix.dtype == jnp.float32 else 2
    depth = -(-matrix.shape[1] // pair)
    whole = jnp.pad(matrix, ((0, panels * COLUMNS - len(matrix)), (0, depth * pair - matrix.shape[1])))
    panels = whole.reshape(panels, COLUMNS, depth, pair).transpose(0, 2, 1, 3)
    return panels if pair > 1 else panels[..., 0]


def code_panels_of(
    weight: Quantised, inputs: int
) -> tuple[Num[Array, "panels depth ..."], Float[Array, "panels groups C"]]:
    """Codes and scales of a weight whose product sums over its first axes."""
    outputs = weight.shape[inputs:]
    is_narrow = weight.scheme == "int4"
    codes = quant.unpack(weight.values, weight.packed) if is_narrow else weight.values
    panels = panels_of(codes.reshape(-1, prod(outputs)).T)
    is_kept = is_narrow and weight.scales.dtype == jnp.bfloat16
    scales = weight.scales if is_kept else weight.scales.astype(jnp.float32)
    scales = quant.spread(scales, (*scales.shape[:inputs], *outputs)).reshape(-1, prod(outputs))
    scales = jnp.pad(scales, ((0, 0), (0, -scales.shape[1] % COLUMNS)))
    scales = jnp.moveaxis(scales.reshape(len(scales), -1, COLUMNS), 1, 0)
    return quant.pack(panels, -1)[..., 0] if is_narrow else panels, scales


def from_panels(w: Packed) -> Any:
    """The weight, or one expert's, as it was."""
    form, K, N = w.codes, prod(w.inputs), prod(w.outputs)
    is_narrow = form is not None and form.scheme == "int4"
    panels = quant.unpack(w.array[..., None], -1) if is_narrow else w.array
    if panels.dtype == jnp.uint16:
        panels = bf12.widened(panels)
    matrix = jnp.moveaxis(panels, 2, 1).reshape(panels.shape[0] * COLUMNS, -1)[:N, :K]
    shape = (*w.outputs, *w.inputs) if w.is_head else (*w.inputs, *w.outputs)
    array = (matrix if w.is_head else matrix.T).reshape(shape)
    if form is None:
        return array
    whole = (*form.scales[: len(w.inputs)], *w.outputs)
    scales = jnp.moveaxis(w.scales, 0, 1).reshape(w.scales.shape[1], -1)[:, :N].reshape(whole)
    first_of_each = tuple(slice(None, None, n // m) for n, m in zip(whole, form.scales, strict=True))
    values = quant.pack(array, form.packed) if is_narrow else array
    return Quantised(values, scales[first_of_each].astype(form.dtype), None, form.scheme, form.packed)


to_panels = jax.jit(panels_of)
to_panels_each = jax.jit(jax.vmap(panels_of))
one_from_panels, each_from_panels = jax.jit(from_panels), jax.jit(jax.vmap(from_panels))
to_code_panels = jax.jit(code_panels_of, static_argnames="inputs")  # layers share one trace
to_code_panels_each = jax.jit(jax.vmap(partial(code_panels_of, inputs=1)))


def shaped(shapes: T, sharding: Any) -> T:
    """ShapeDtypeStructs with a sharding."""

    def leaf(x: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding and fitted(sharding, x.shape))

    return jax.tree.map(leaf, shapes)


def applied(f: Any, weight: Any) -> Any:
    """f of a weight; of ShapeDtypeStructs where its arrays are such."""
    first = jax.tree.leaves(weight)[0]
    if isinstance(first, jax.ShapeDtypeStruct):
        return shaped(jax.eval_shape(f, weight), first.sharding)
    return f(weight)


def narrowed(panels: Any, target: str) -> Any:
    """Panels as `bf12` has them, where the kernels read those."""
    is_read = library.reads_bf12(target) and bf12.can_be_narrowed(panels)
    return bf12.narrowed(panels) if is_read else panels


def pack_matrix(
    matrix: Any,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    target: str,
    is_head: bool = False,
) -> Packed:
    """A matrix [outputs, inputs]."""
    panels = applied(to_panels, matrix)
    return Packed(narrowed(panels, target), None, inputs, outputs, target, is_head=is_head)


def pack_codes(weight: Quantised, inputs: int, target: str) -> Packed:
    """Codes whose product sums over their first axes."""
    array, scales = applied(partial(to_code_panels, inputs=inputs), weight)
    form = CodesForm(weight.scheme, weight.packed, weight.scales.shape, weight.scales.dtype.name)
    return Packed(array, scales, weight.shape[:inputs], weight.shape[inputs:], target, form)


def pack_experts(weight: Any, target: str) -> Packed:
    """Matrices [E, inputs, outputs], or their codes."""
    _, K, N = weight.shape
    if not isinstance(weight, Quantised):
        panels = applied(lambda w: to_panels_each(jnp.swapaxes(w, 1, 2)), weight)
        return Packed(narrowed(panels, target), None, (K,), (N,), target)
    array, scales = applied(to_code_panels_each, weight)
    form = CodesForm(weight.scheme, weight.packed, weight.scales.shape[1:], weight.scales.dtype.name)
    return Packed(array, scales, (K,), (N,), target, form)

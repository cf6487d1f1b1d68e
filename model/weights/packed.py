"""Weights that lie in memory as duetto's own CPU kernels read them (`cpu_kernels`), and their products.

A kernel adds up each number in one order, whatever the number of rows: a row's bits are the same in every
step. XLA's products on a CPU choose their order by the rows, and pack a weight of 16 bits in each call.
"""

from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ...cpu_kernels import library
from ..layers import einsum, ragged_product
from ..transformer import Decoder
from ..tree import holds, pytree, static, unwrapped
from .compress import CONTRACTED, replaced
from .kernel_norm import with_kernel_norms, without_kernel_norms
from .transposed import NAMES, Transposed, is_matrix_on_cpu, like, transpose

T = TypeVar("T")
COLUMNS = 32  # outputs of a panel, as in the kernels
OUTPUTS = jnp.bfloat16, jnp.float32  # dtypes of weights, and of products


@pytree
class Packed:
    """A weight [*inputs, *outputs] in panels of COLUMNS outputs: [panels, inputs, COLUMNS], or in bfloat16
    [panels, pairs of inputs, COLUMNS, 2]; the last ones are filled up with zeros.

    target: the kernel's name for XLA. is_head: the weight was an output matrix [outputs, inputs]; is_tied: a
    copy of the embedding.
    """

    array: Any
    inputs: tuple[int, ...] = static(())
    outputs: tuple[int, ...] = static(())
    target: str = static("")
    is_head: bool = static(False)
    is_tied: bool = static(False)

    @property
    def factors(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays that `ragged` multiplies rows with."""
        return ((*self.inputs, *self.outputs),)

    @property
    def whole(self) -> Any:
        """The weight as it was, an array that is a copy, or a ShapeDtypeStruct."""
        shape = (*self.outputs, *self.inputs) if self.is_head else (*self.inputs, *self.outputs)
        if isinstance(self.array, jax.ShapeDtypeStruct):
            return like(self.array, shape)
        matrix = from_panels(self.array)[: prod(self.outputs), : prod(self.inputs)]
        return (matrix if self.is_head else matrix.T).reshape(shape)

    def einsum(self, equation: str, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """The product of x, whose last axes are the inputs, by an equation that ends in the outputs; XLA's
        product where no kernel is of these dtypes."""
        dtype = dtype or x.dtype
        if x.dtype != self.array.dtype or dtype not in OUTPUTS:
            return einsum(equation, x, self.whole, dtype)
        rows = x.shape[: x.ndim - len(self.inputs)]
        product = jax.ffi.ffi_call(
            self.target,
            jax.ShapeDtypeStruct((*rows, prod(self.outputs)), dtype),
            vmap_method="sequential",
        )(x.reshape(*rows, prod(self.inputs)), self.array)
        return product.reshape(*rows, *self.outputs)

    def ragged(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], owner: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """Products of consecutive rows with one expert's weights each."""
        return ragged_product(rows, self.whole, sizes, owner)


@jax.jit
def to_panels(matrix: Float[Array, "outputs inputs"]) -> Float[Array, "panels depth ..."]:
    panels, pair = -(-len(matrix) // COLUMNS), 4 // matrix.dtype.itemsize
    depth = -(-matrix.shape[1] // pair)
    whole = jnp.pad(matrix, ((0, panels * COLUMNS - len(matrix)), (0, depth * pair - matrix.shape[1])))
    panels = whole.reshape(panels, COLUMNS, depth, pair).transpose(0, 2, 1, 3)
    return panels if pair > 1 else panels[..., 0]


def from_panels(panels: Float[Array, "panels depth ..."]) -> Float[Array, "outputs inputs"]:
    """The matrix, its padding included."""
    return jnp.moveaxis(panels, 2, 1).reshape(panels.shape[0] * COLUMNS, -1)


def pack(weight: Transposed, target: str, **head: bool) -> Packed:
    """A weight whose array is one, or a ShapeDtypeStruct."""
    if isinstance(weight.array, jax.ShapeDtypeStruct):
        panels = jax.eval_shape(to_panels, weight.array)
        where = weight.array.sharding
        panels = like(jax.ShapeDtypeStruct(panels.shape, panels.dtype, sharding=where), panels.shape)
    else:
        panels = to_panels(weight.array)
    return Packed(panels, weight.inputs, weight.outputs, target, **head)


def pack_head(matrix: Any, target: str, is_tied: bool) -> Packed:
    outputs, inputs = matrix.shape
    return pack(Transposed(matrix, (inputs,), (outputs,)), target, is_head=True, is_tied=is_tied)


def packed(params: T, isa: str, donate: bool = False) -> T:
    """A tree of parameters, or of ShapeDtypeStructs, with a CPU's projections and output matrix as `Packed`,
    for an instruction set; an output matrix that is the embedding too is a copy.

    Left as they are: experts, latents' projections, records, weights of other dtypes and those that lie on
    several devices. If a weight is packed, kernels compute the norms too. With `donate` each weight is
    deleted when its copy is ready, but no embedding.
    """
    target = library.target("product", isa)

    def leaf(key: Any, weight: Any) -> Any:
        name = jax.tree_util.keystr(key, simple=True, separator=".").rpartition(".")[2]
        if not can_be_packed(name, weight):
            return weight
        if name == "head":
            done = pack_head(weight, target, is_tied=False)
        else:
            is_ready = isinstance(weight, Transposed)
            done = pack(weight if is_ready else transpose(weight, len(CONTRACTED[name])), target)
        return done if isinstance(done.array, jax.ShapeDtypeStruct) else replaced(weight, done, donate)

    found = jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_record)
    if isinstance(found, Decoder) and found.head is None and can_be_packed("head", found.embed):
        found = replace(found, head=pack_head(found.embed, target, is_tied=True))
    if not is_packed(found):
        return params
    return with_kernel_norms(found, library.target("norm", isa))  # type: ignore[return-value]


def can_be_packed(name: str, weight: Any) -> bool:
    """True for a projection, or an output matrix, of a dtype and on a device that kernels are for."""
    if isinstance(weight, Transposed):
        return weight.array.dtype in OUTPUTS
    axes = 2 if name == "head" else -CONTRACTED[name][0] if name in NAMES else 0
    return is_matrix_on_cpu(weight, axes) and weight.dtype in OUTPUTS


def unpacked(params: T) -> T:
    """The tree with arrays in place of `Packed`, which are copied, and without the embedding's copy; itself
    where it has none."""
    if isinstance(params, Decoder) and isinstance(params.head, Packed) and params.head.is_tied:
        params = replace(params, head=None)
    return without_kernel_norms(unwrapped(params, Packed, lambda x: x.whole))


def packed_as(served: Any, params: T) -> T:
    """Parameters packed as those of a running engine are."""
    isa = kernels_in(served)
    return params if isa is None else packed(params, isa)


def kernels_in(params: Any) -> str | None:
    """The instruction set of the kernels that multiply parameters, or None."""
    target = target_in(params)
    return None if target is None else library.isa_of(target)


def target_in(params: Any) -> str | None:
    """The name of those kernels for XLA, or None."""
    found = (x.target for x in jax.tree.leaves(params, is_leaf=is_record) if isinstance(x, Packed))
    return next(found, None)


def is_packed(params: Any) -> bool:
    return holds(params, Packed)


def is_record(x: Any) -> bool:
    return isinstance(x, Packed | Transposed)

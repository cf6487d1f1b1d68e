"""Projections that lie in memory as a CPU multiplies them fastest: each output's inputs side by side.

A product of 16-bit floats packs its weight anew in every call, and takes two thirds of the time where the
inputs of an output are neighbours. The bits are those of the weight as it was.
"""

from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..layers import einsum, ragged_product
from ..sharding import fitted
from ..tree import holds, pytree, static, unwrapped
from .compress import CONTRACTED, replaced

T = TypeVar("T")
NAMES = ("q", "k", "v", "o", "gate", "up", "down")


@pytree
class Transposed:
    """A projection [*inputs, *outputs], kept as a matrix [outputs, inputs]: XLA turns back one of more axes
    in every step."""

    array: Any
    inputs: tuple[int, ...] = static(())
    outputs: tuple[int, ...] = static(())

    @property
    def factors(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the arrays that `ragged` multiplies rows with."""
        return ((*self.inputs, *self.outputs),)

    @property
    def whole(self) -> Any:
        """The projection as it was, an array that is a copy, or a ShapeDtypeStruct."""
        if isinstance(self.array, jax.ShapeDtypeStruct):
            return like(self.array, (*self.inputs, *self.outputs))
        return self.array.T.reshape(*self.inputs, *self.outputs)

    def einsum(self, equation: str, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """The product of x, whose last axes are the inputs, by an equation that ends in the outputs."""
        rows = x.reshape(*x.shape[: x.ndim - len(self.inputs)], prod(self.inputs))
        product = einsum("...d,fd->...f", rows, self.array, dtype)
        return product.reshape(*product.shape[:-1], *self.outputs)

    def ragged(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], owner: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """Products of consecutive rows with one expert's weights each."""
        return ragged_product(rows, self.whole, sizes, owner)


def like(x: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding and fitted(x.sharding, shape))


def transpose(weight: Any, inputs: int) -> Transposed:
    """A weight, an array or a ShapeDtypeStruct, whose product sums over its first axes."""
    first, last = weight.shape[:inputs], weight.shape[inputs:]
    if isinstance(weight, jax.ShapeDtypeStruct):
        return Transposed(like(weight, (prod(last), prod(first))), first, last)
    return Transposed(weight.reshape(prod(first), prod(last)).T, first, last)


def transposed(params: T, donate: bool = False) -> T:
    """A tree of parameters, or of ShapeDtypeStructs, with a CPU's projections of 16 bits as `Transposed`.

    Left as they are: experts, latents' projections, records, weights of 32 bits and those that lie on several
    devices; a tree with nothing else is given back itself. With `donate` each weight is deleted when its copy
    is ready.
    """

    def leaf(key: Any, weight: Any) -> Any:
        name = jax.tree_util.keystr(key, simple=True, separator=".").rpartition(".")[2]
        if not can_be_transposed(name, weight):
            return weight
        done = transpose(weight, len(CONTRACTED[name]))
        return replaced(weight, done, donate) if isinstance(weight, jax.Array) else done

    found = jax.tree_util.tree_map_with_path(leaf, params, is_leaf=is_record)
    return found if is_transposed(found) else params


def can_be_transposed(name: str, weight: Any) -> bool:
    if name not in NAMES or not is_matrix_on_cpu(weight, -CONTRACTED[name][0]):
        return False
    return jnp.issubdtype(weight.dtype, jnp.floating) and weight.dtype.itemsize == 2


def is_matrix_on_cpu(weight: Any, axes: int) -> bool:
    """True for an array, or ShapeDtypeStruct, with a number of axes on one device that is a CPU."""
    if not isinstance(weight, jax.Array | jax.ShapeDtypeStruct) or weight.ndim != axes:
        return False
    devices = weight.sharding.device_set if weight.sharding is not None else ()
    return len(devices) == 1 and all(device.platform == "cpu" for device in devices)


def untransposed(params: T) -> T:
    """The tree with projections in place of `Transposed`, which are copied; itself where it has none."""
    return unwrapped(params, Transposed, lambda x: x.whole)


def is_transposed(params: Any) -> bool:
    return holds(params, Transposed)


def is_record(x: Any) -> bool:
    return isinstance(x, Transposed)

"""Projections in the memory layout that a CPU multiplies fastest: each output's inputs side by side.

A product of 16-bit floats repacks its weight in every call. It takes two thirds of the time if the inputs of
an output are neighbours. Bits do not change.
"""

from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..layers import einsum, ragged_dot
from ..sharding import array_devices, fit_sharding
from ..tree import map_by_path, pytree, static
from .compression.compress import CONTRACTED_AXES, place_replacement

T = TypeVar("T")
TRANSPOSED_NAMES = ("q", "k", "v", "o", "gate", "up", "down")


@pytree
class Transposed:
    """A projection [*inputs, *outputs], kept as a matrix [outputs, inputs].

    XLA would transpose an array of more axes back in every step.
    """

    array: Any
    inputs: tuple[int, ...] = static(())
    outputs: tuple[int, ...] = static(())

    @property
    def ragged_dot_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the arrays that `ragged_dot` multiplies rows by."""
        return ((*self.inputs, *self.outputs),)

    @property
    def original(self) -> Any:
        """Return the projection before its transpose: an array that is a copy, or a ShapeDtypeStruct."""
        if isinstance(self.array, jax.ShapeDtypeStruct):
            return abstract_like(self.array, (*self.inputs, *self.outputs))
        return self.array.T.reshape(*self.inputs, *self.outputs)

    def einsum(self, equation: str, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """Compute the product of x, whose last axes are the inputs. The equation ends in the outputs."""
        rows = x.reshape(*x.shape[: x.ndim - len(self.inputs)], prod(self.inputs))
        product = einsum("...d,fd->...f", rows, self.array, dtype)
        return product.reshape(*product.shape[:-1], *self.outputs)

    def ragged_dot(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], row_experts: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """Multiply consecutive rows by one expert's matrix each."""
        return ragged_dot(rows, self.original, sizes, row_experts)


def abstract_like(x: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """Return a ShapeDtypeStruct of another shape, with the dtype and a fitting sharding."""
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=x.sharding and fit_sharding(x.sharding, shape))


def transpose_weight(weight: Any, inputs: int) -> Transposed:
    """Transpose a weight, an array or a ShapeDtypeStruct, whose product sums over its first axes."""
    first, last = weight.shape[:inputs], weight.shape[inputs:]
    if isinstance(weight, jax.ShapeDtypeStruct):
        return Transposed(abstract_like(weight, (prod(last), prod(first))), first, last)
    return Transposed(weight.reshape(prod(first), prod(last)).T, first, last)


def transpose_params(params: T, donate: bool = False) -> T:
    """Return parameters, or ShapeDtypeStructs, with a CPU's 16-bit projections as `Transposed`.

    Unchanged are: experts, latents' projections, records, weights of 32 bits and those on several devices.
    With `donate` each weight is deleted when its copy is ready.
    """

    def transpose_leaf(path: str, weight: Any) -> Any:
        name = path.rpartition(".")[2]
        if not can_transpose(name, weight):
            return weight
        return place_replacement(weight, transpose_weight(weight, len(CONTRACTED_AXES[name])), donate)

    return map_by_path(params, Transposed, transpose_leaf)


def can_transpose(name: str, weight: Any) -> bool:
    """Return True for a 16-bit projection on one device that is a CPU."""
    if name not in TRANSPOSED_NAMES or not is_matrix_on_cpu(weight, -CONTRACTED_AXES[name][0]):
        return False
    return jnp.issubdtype(weight.dtype, jnp.floating) and weight.dtype.itemsize == 2


def is_matrix_on_cpu(weight: Any, axes: int) -> bool:
    """Return True for an array, or ShapeDtypeStruct, of `axes` axes on one device that is a CPU."""
    if not isinstance(weight, jax.Array | jax.ShapeDtypeStruct) or weight.ndim != axes:
        return False
    devices = array_devices(weight)
    return len(devices) == 1 and all(device.platform == "cpu" for device in devices)

"""Weights and norms whose products are the engine's, and whose derivatives are XLA's.

A record holds the trainer's array, and packs it inside of the step. Its product is the engine's kernel, with
the bits of the sampler. Its derivative is that of XLA's product, at the same activations.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..cpu_kernels.library import ffi_target_name
from ..model.config import NormKind
from ..model.experts.mixture import MoE
from ..model.layers import Norm, einsum, normalise, ragged_dot
from ..model.transformer import Decoder
from ..model.tree import map_by_path, map_instances, pytree, static
from ..model.weights.cpu.kernel_norm import KernelNorm, with_kernel_norms
from ..model.weights.cpu.packed import can_pack, pack_weight
from .experts import TrainableExperts


@pytree
class TrainableWeight:
    """An array that CPU kernels multiply, with the derivative of XLA's products.

    name: name of the weight's field.
    target: the kernel's name for XLA.
    """

    array: Any
    name: str = static("")
    target: str = static("")

    @property
    def ragged_dot_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of the arrays that `ragged_dot` multiplies rows by."""
        return (self.array.shape,)

    def ragged_dot(
        self, rows: Float[Array, "rows D"], sizes: Int[Array, " E"], row_experts: Int[Array, " rows"]
    ) -> Float[Array, "rows F"]:
        """Multiply consecutive rows by one expert's matrix each, as with the array."""
        return ragged_dot(rows, self.array, sizes, row_experts)

    def einsum(self, equation: str, x: Float[Array, "..."], dtype: Any = None) -> Float[Array, "..."]:
        """Compute the product of x and the array."""
        return multiply(self.name, self.target, equation, x, self.array, jnp.dtype(dtype or x.dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 5))
def multiply(
    name: str, target: str, equation: str, x: Float[Array, "..."], w: Float[Array, "..."], dtype: Any
) -> Float[Array, "..."]:
    """Compute a product by a CPU kernel."""
    return pack_weight(name, w, target).einsum(equation, x, dtype)


def _multiply_backward(name: str, target: str, equation: str, dtype: Any, operands: Any, g: Any) -> Any:
    return jax.vjp(lambda x, w: einsum(equation, x, w, dtype), *operands)[1](g)


multiply.defvjp(lambda *arguments: (multiply(*arguments), arguments[3:5]), _multiply_backward)


# ---------------------------------------------------------------- norms


@pytree
class TrainableNorm:
    """Gain and bias of a norm that a CPU kernel computes, with the derivative of XLA's.

    target: the kernel's name for XLA.
    """

    gain: Any
    bias: Any = None
    target: str = static("")

    def normalise(
        self, x: Float[Array, "*rows D"], kind: NormKind, axes: int | tuple[int, ...] = -1
    ) -> Float[Array, "*rows D"]:
        """Normalise along the last axis or axes, as `layers.normalise`."""
        return normalise_rows(self.target, kind, axes, x, self.gain, self.bias)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def normalise_rows(
    target: str, kind: NormKind, axes: Any, x: Float[Array, "*rows D"], gain: Any, bias: Any
) -> Float[Array, "*rows D"]:
    """Normalise by a CPU kernel."""
    return KernelNorm(gain, bias, target).normalise(x, kind, axes)


def _normalise_backward(target: str, kind: NormKind, axes: Any, operands: Any, g: Any) -> Any:
    return jax.vjp(lambda x, gain, bias: normalise(x, Norm(gain, bias), kind, axes), *operands)[1](g)


normalise_rows.defvjp(
    lambda target, kind, axes, *operands: (normalise_rows(target, kind, axes, *operands), operands),
    _normalise_backward,
)


# ---------------------------------------------------------------- trees


def make_trainable(params: Decoder, isa: str) -> Decoder:
    """Return parameters as records that CPU kernels of an instruction set multiply, and that a trainer
    differentiates. They are the weights and norms that an engine packs (`pack_params`)."""
    product = ffi_target_name("product", isa)
    head = params.embed if params.head is None else params.head
    wrapped = map_by_path(wrap_experts(params, product), TrainableExperts, partial(wrap_weight, product))
    wrapped = replace(wrapped, head=TrainableWeight(head, "head", product))
    normed = with_kernel_norms(wrapped, ffi_target_name("norm", isa))
    return map_instances(normed, KernelNorm, lambda x: TrainableNorm(x.gain, x.bias, x.target))


def wrap_weight(target: str, path: str, weight: Any) -> Any:
    """Wrap an array that an engine packs."""
    name = path.rpartition(".")[2]
    is_packed = not isinstance(weight, TrainableExperts) and can_pack(name, weight)
    return TrainableWeight(weight, name, target) if is_packed else weight


def wrap_experts(params: Decoder, target: str) -> Decoder:
    """Return parameters with experts that can be differentiated; XLA multiplies them if `target` is ""."""

    def wrap(w: MoE) -> MoE:
        return replace(w, experts=TrainableExperts(w.experts, target))  # type: ignore[arg-type]

    return map_instances(params, MoE, wrap)

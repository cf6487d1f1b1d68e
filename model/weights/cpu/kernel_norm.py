"""Norms by duetto's own CPU kernels (`cpu_kernels`). Their sums run in one order for every number of rows.

On a CPU, XLA sums in an order that depends on the amount of numbers. So a row's bits depend on the number of
rows.
"""

from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...attention import Attention
from ...config import NormKind
from ...layers import Norm, normalise
from ...tree import map_instances, pytree, static

T = TypeVar("T")
KERNEL_NORM_DTYPES = jnp.bfloat16, jnp.float32
HEAD_NORMS = "q_norm", "k_norm", "v_norm"  # fields of `Attention`


@pytree
class KernelNorm:
    """Gain and bias of a norm that a CPU kernel computes.

    target: the kernel's name for XLA.
    is_bare: True if the record replaces a gain, not a Norm.
    """

    gain: Any
    bias: Any = None
    target: str = static("")
    is_bare: bool = static(False)

    @property
    def original(self) -> Any:
        """Return the norm, or the gain, that the record replaces."""
        return self.gain if self.is_bare else Norm(self.gain, self.bias)

    def normalise(
        self, x: Float[Array, "*rows D"], kind: NormKind, axes: int | tuple[int, ...] = -1
    ) -> Float[Array, "*rows D"]:
        """Normalise along the last axes, as `layers.normalise`. XLA computes it if dtypes differ."""
        weights = [w for w in (self.gain, self.bias) if w is not None]
        if x.dtype not in KERNEL_NORM_DTYPES or any(w.dtype != x.dtype for w in weights):
            return normalise(x, Norm(self.gain, self.bias), kind, axes)
        empty = np.zeros(0, x.dtype)
        gain, bias = (empty if w is None else w for w in (self.gain, self.bias))
        size = prod(x.shape[-1:] if isinstance(axes, int) else x.shape[-len(axes) :])
        call = jax.ffi.ffi_call(self.target, jax.ShapeDtypeStruct(x.shape, x.dtype), vmap_method="sequential")
        eps, offset = np.float32(kind.eps), np.float32(kind.offset)
        return call(x, gain, bias, D=np.int64(size), eps=eps, offset=offset, is_layer=kind.kind == "layer")


def with_kernel_norms(params: T, target: str) -> T:
    """Return parameters with the norms of the residual stream and of attention's heads as `KernelNorm`.

    Heads get one without a gain too, which is used if the layer norms them. XLA still computes the norms of
    latents, and those of the outputs of recurrent layers.
    """

    def wrap_bare_gain(gain: Any) -> Any:
        return gain if isinstance(gain, KernelNorm) else KernelNorm(gain, None, target, is_bare=True)

    def wrap_norms(x: Any) -> Any:
        if isinstance(x, Norm):
            return KernelNorm(x.gain, x.bias, target)
        return replace(x, **{name: wrap_bare_gain(getattr(x, name)) for name in HEAD_NORMS})

    return map_instances(params, (Norm, Attention), wrap_norms)

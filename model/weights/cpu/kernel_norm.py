"""Norms by duetto's own CPU kernels (`cpu_kernels`), whose sums run in one order whatever the number of rows.

XLA sums few numbers on a CPU in another order than many, and so gives a row other bits beside fewer rows.
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
from ...tree import pytree, static, unwrapped

T = TypeVar("T")
DTYPES = jnp.bfloat16, jnp.float32


@pytree
class KernelNorm:
    """A norm's gain and bias, with the kernel's name for XLA. is_bare: the gain stood alone."""

    gain: Any
    bias: Any = None
    target: str = static("")
    is_bare: bool = static(False)

    @property
    def whole(self) -> Any:
        """The norm, or the gain, as it was."""
        return self.gain if self.is_bare else Norm(self.gain, self.bias)

    def normalise(
        self, x: Float[Array, "*rows D"], kind: NormKind, axes: int | tuple[int, ...] = -1
    ) -> Float[Array, "*rows D"]:
        """`layers.normalise` along the last axes; by XLA where numbers are of several dtypes."""
        weights = [w for w in (self.gain, self.bias) if w is not None]
        if x.dtype not in DTYPES or any(w.dtype != x.dtype for w in weights):
            return normalise(x, Norm(self.gain, self.bias), kind, axes)
        none = np.zeros(0, x.dtype)
        gain, bias = (none if w is None else w for w in (self.gain, self.bias))
        size = prod(x.shape[-1:] if isinstance(axes, int) else x.shape[-len(axes) :])
        call = jax.ffi.ffi_call(self.target, jax.ShapeDtypeStruct(x.shape, x.dtype), vmap_method="sequential")
        eps, offset = np.float32(kind.eps), np.float32(kind.offset)
        return call(x, gain, bias, D=np.int64(size), eps=eps, offset=offset, is_layer=kind.kind == "layer")


def with_kernel_norms(params: T, target: str) -> T:
    """A tree of parameters with the norms of the residual stream, of queries and of keys as `KernelNorm`.

    Left to XLA: the norms of latents, and of what recurrent layers read out.
    """

    def bare(gain: Any) -> Any:
        is_done = gain is None or isinstance(gain, KernelNorm)
        return gain if is_done else KernelNorm(gain, None, target, is_bare=True)

    def leaf(x: Any) -> Any:
        if isinstance(x, Norm):
            return x if x.gain is None else KernelNorm(x.gain, x.bias, target)
        if isinstance(x, Attention):
            return replace(x, q_norm=bare(x.q_norm), k_norm=bare(x.k_norm))
        return x

    return jax.tree.map(leaf, params, is_leaf=lambda x: isinstance(x, Norm | Attention))


def without_kernel_norms(params: T) -> T:
    """The tree as it was; itself where it has none."""
    return unwrapped(params, KernelNorm, lambda x: x.whole)

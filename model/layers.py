"""The small pure functions that every decoder is made of."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def einsum(equation: str, x: Array, w: Array, dtype: Any = None) -> Array:
    """The one product of two arrays, in their dtype or another; float32 stays float32 on every device."""
    precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, w, precision=precision, preferred_element_type=dtype)


def rms_norm(x: Float[Array, "*rows D"], gain: Float[Array, " D"], eps: float) -> Float[Array, "*rows D"]:
    """Root-mean-square normalisation in float32 (Zhang and Sennrich, arXiv 1910.07467)."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * jnp.expand_dims(gain, range(x.ndim - 1))


def rotation(positions: Int[Array, "B T"], frequencies: np.ndarray) -> tuple[Array, Array]:
    """Cosine and sine of every position's angles, float32 [B, T, 1, H/2] each."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies[None, None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "B T heads H"], turn: tuple[Array, Array]) -> Float[Array, "B T heads H"]:
    """Turn the pairs (i, i + H/2) of each head by their position's angle."""
    cos, sin = turn
    left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1).astype(x.dtype)

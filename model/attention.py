"""Grouped-query attention over keys that lie side by side: the reference, and the attention of a model without a cache."""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .layers import einsum

MASKED = -1e30


class Attend(Protocol):
    """How keys are kept and read, the seam between the model and every cache.

    Takes the state, the layer's number, queries [B,T,N,H], new keys and values [B,T,K,H]; gives the new state and [B,T,N,H].
    """

    def __call__(self, state: Any, layer: int, q: Array, k: Array, v: Array) -> tuple[Any, Array]: ...


def grouped(q: Float[Array, "B T N H"], kv_heads: int) -> Float[Array, "B T K G H"]:
    """Query heads grouped by the key head that they share (Ainslie et al., GQA, arXiv 2305.13245)."""
    B, T, N, H = q.shape
    return q.reshape(B, T, kv_heads, N // kv_heads, H)


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask: Bool[Array, "#B T S"],
) -> Float[Array, "B T N H"]:
    """Softmax attention with scores in float32; every query must see at least one key."""
    scale = q.shape[-1] ** -0.5
    scores = einsum("btkgh,bskh->bkgts", grouped(q, k.shape[2]), k, jnp.float32)
    weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores * scale, MASKED), axis=-1)
    out = einsum("bkgts,bskh->btkgh", weights.astype(v.dtype), v)
    return out.reshape(q.shape)


def causal(state: Any, layer: int, q: Array, k: Array, v: Array) -> tuple[Any, Array]:
    """The `attend` without a cache: all tokens of the row are given, each sees itself and those before it."""
    T = q.shape[1]
    return state, attention(q, k, v, jnp.tril(jnp.ones((1, T, T), bool)))

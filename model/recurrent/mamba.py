"""Mamba-2: short convolutions, a state that fades as its input says, and a gate on what it answers.

In the words of attention: C are queries, B keys, x values, each times its step, which also says how much of
the state fades.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..config import NormKind
from ..layers import Norm, biased, einsum, normalise, scaled
from ..tree import Spec, pytree
from .kinds import Mamba
from .linear import Terms
from .states import Convolution, Recur, Recurrence, RecurrentInputs


@pytree
class MambaMixer:
    """Projections of one layer, in which each of K key heads has G value heads: V is G times their size."""

    z: Any  # [D,K,V], of the gate
    v: Any  # [D,K,V]
    k: Any  # [D,K,H]
    q: Any  # [D,K,H]
    step: Any  # [D,K,G]
    v_conv: Any  # [K,V,kernel]
    k_conv: Any  # [K,H,kernel]
    q_conv: Any  # [K,H,kernel]
    step_offset: Any  # [K,G]
    decay_log: Any  # [K,G]
    skip: Any  # [K,G], of a value's way past the state
    o: Any  # [K,V,D]
    norm: Any = None  # [K,V]
    z_bias: Any = None  # [K,V]
    v_bias: Any = None  # [K,V]
    k_bias: Any = None  # [K,H]
    q_bias: Any = None  # [K,H]
    step_bias: Any = None  # [K,G]
    v_conv_bias: Any = None  # [K,V]
    k_conv_bias: Any = None  # [K,H]
    q_conv_bias: Any = None  # [K,H]
    o_bias: Any = None  # [D]


def mamba_spec(c: Mamba, D: int, depth: int) -> MambaMixer:
    """The parameters of one layer of `depth`."""
    K, G, H, V = c.key_heads, c.groups, c.key_size, c.groups * c.value_size
    heads, each = ("state_heads", "head"), ("state_heads", "group")

    def bias(size: int, axes: tuple[str, str], here: bool) -> Spec | None:
        return Spec((K, size), axes, scale=0.0) if here else None

    def conv(size: int) -> Spec:
        return Spec((K, size, c.kernel), (*heads, "kernel"), scale=0.5 / c.kernel**0.5)

    return MambaMixer(
        z=Spec((D, K, V), ("model", *heads)),
        v=Spec((D, K, V), ("model", *heads)),
        k=Spec((D, K, H), ("model", *heads)),
        q=Spec((D, K, H), ("model", *heads)),
        step=Spec((D, K, G), ("model", *each)),
        v_conv=conv(V),
        k_conv=conv(H),
        q_conv=conv(H),
        step_offset=Spec((K, G), each),
        decay_log=Spec((K, G), each),
        skip=Spec((K, G), each, mean=1.0, scale=0.0),
        o=Spec((K, V, D), (*heads, "model"), scale=0.02 / (2 * depth) ** 0.5),
        norm=Spec((K, V), heads, mean=1.0, scale=0.0) if c.norm else None,
        z_bias=bias(V, heads, c.bias),
        v_bias=bias(V, heads, c.bias),
        k_bias=bias(H, heads, c.bias),
        q_bias=bias(H, heads, c.bias),
        step_bias=bias(G, each, c.bias),
        v_conv_bias=bias(V, heads, c.conv_bias),
        k_conv_bias=bias(H, heads, c.conv_bias),
        q_conv_bias=bias(H, heads, c.conv_bias),
        o_bias=Spec((D,), ("model",), scale=0.0) if c.output_bias else None,
    )


def mix_mamba(
    w: MambaMixer, c: Mamba, x: Float[Array, "B T D"], rotary: None, attend: Recur, state: Any, i: int
) -> tuple[Any, Float[Array, "B T D"]]:
    """The recurrence of layer i over normed x, and attend's new state."""

    def projected(own: Any, bias: Any, scale: float, dtype: Any = None) -> Float[Array, "B T K size"]:
        bias = None if bias is None else bias.astype(dtype or x.dtype)
        return scaled(biased(einsum("btd,dkh->btkh", x, own, dtype), bias), scale)

    of_z, of_v, of_k, of_q, of_step = c.scales
    parts = (
        projected(w.v, w.v_bias, of_v),
        projected(w.k, w.k_bias, of_k),
        projected(w.q, w.q_bias, of_q),
    )
    step = projected(w.step, w.step_bias, of_step, jnp.float32)
    step = jnp.clip(jax.nn.softplus(biased(step, w.step_offset.astype(jnp.float32))), *c.step_limits)
    decay = -jnp.exp(w.decay_log.astype(jnp.float32))[None, None] * step
    own = Recurrence(c.state, convolutions(w), jax.nn.silu, partial(terms, c, w.skip))
    state, out = attend.recur(state, i, own, RecurrentInputs(parts, (decay, step)))
    out = gated(w, c, out.reshape(parts[0].shape), projected(w.z, w.z_bias, of_z).astype(jnp.float32))
    return state, biased(einsum("btkv,kvd->btd", out.astype(x.dtype), w.o), w.o_bias)


def convolutions(w: MambaMixer) -> tuple[Convolution, ...]:
    return (
        Convolution(w.v_conv, w.v_conv_bias),
        Convolution(w.k_conv, w.k_conv_bias),
        Convolution(w.q_conv, w.q_conv_bias),
    )


def terms(c: Mamba, skip: Float[Array, "K G"], parts: tuple[Any, ...], beside: tuple[Any, Any]) -> Terms:
    """Queries and keys of as many heads as values have, and values as their steps weigh them."""
    v, k, q = parts
    B, T, N = *v.shape[:2], c.num_heads
    v = v.reshape(B, T, N, c.value_size)
    decay, step = (x.reshape(B, T, N) for x in beside)
    q, k = (jnp.repeat(x, c.groups, axis=2) for x in (q, k))
    passed = v * skip.astype(jnp.float32).reshape(1, 1, N, 1)
    return Terms(q, k, v * step[..., None], decay, skip=passed)


def gated(
    w: MambaMixer, c: Mamba, out: Float[Array, "B T K V"], z: Float[Array, "B T K V"]
) -> Float[Array, "B T K V"]:
    """Input of the last projection, in float32; a norm is over all values of a key head."""

    def normed(x: Float[Array, "B T K V"]) -> Float[Array, "B T K V"]:
        return normalise(x, Norm(w.norm.astype(jnp.float32)), NormKind(eps=c.eps))

    if c.norm == "then gated":
        return normed(out) * jax.nn.silu(z)
    out = out * jax.nn.silu(z)
    return out if c.norm is None else normed(out)

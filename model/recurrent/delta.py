"""Gated DeltaNet: short convolutions, the gated delta rule, and a gate on what it answers."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..config import NormKind
from ..layers import biased, einsum, rms_norm
from ..tree import Spec, pytree
from .kinds import DeltaNet
from .linear import Terms
from .states import Convolution, Recur, Recurrence, RecurrentInputs

EPS = 1e-6  # of the lengths of queries and keys


@pytree
class DeltaAttention:
    """Projections of one layer, in which each of K key heads has G value heads. Gate and decay are made
    straight from x, or through a rank of their own."""

    q: Any  # [D,K,H]
    k: Any  # [D,K,H]
    v: Any  # [D,K,G,U]
    rate: Any  # [D,K,G]
    decay: Any  # [D,K,G], or [rank,K,G,H]
    gate: Any  # [D,K,G,U], or [rank,K,G,U]
    q_conv: Any  # [K,H,kernel]
    k_conv: Any  # [K,H,kernel]
    v_conv: Any  # [K,G,U,kernel]
    decay_log: Any  # [K,G]
    decay_bias: Any  # [K,G], or [K,G,H]
    norm: Any  # [U]
    o: Any  # [K,G,U,D]
    decay_down: Any = None  # [D,rank]
    gate_down: Any = None  # [D,rank]


def delta_spec(c: DeltaNet, D: int, depth: int) -> DeltaAttention:
    """The parameters of one layer of `depth`."""
    K, G, H, U = c.key_heads, c.groups, c.key_size, c.value_size
    key, value = ("state_heads", "head"), ("state_heads", "group", "head")
    each = (K, G) if c.decay_rank is None else (K, G, H)

    def conv(sizes: tuple[int, ...], axes: tuple[str, ...]) -> Spec:
        return Spec((*sizes, c.kernel), (*axes, "kernel"), scale=0.5 / c.kernel**0.5)

    def down(rank: int | None) -> Spec | None:
        return None if rank is None else Spec((D, rank), ("model", "rank"))

    def up(rank: int | None, sizes: tuple[int, ...]) -> Spec:
        return Spec((rank or D, *sizes), ("rank" if rank else "model", *value[: len(sizes)]))

    return DeltaAttention(
        q=Spec((D, K, H), ("model", *key)),
        k=Spec((D, K, H), ("model", *key)),
        v=Spec((D, K, G, U), ("model", *value)),
        rate=Spec((D, K, G), ("model", *value[:2])),
        decay=up(c.decay_rank, each),
        gate=up(c.gate_rank, (K, G, U)),
        q_conv=conv((K, H), key),
        k_conv=conv((K, H), key),
        v_conv=conv((K, G, U), value),
        decay_log=Spec((K, G), value[:2]),
        decay_bias=Spec(each, value[: len(each)]),
        norm=Spec((U,), ("head",), mean=1.0, scale=0.0),
        o=Spec((K, G, U, D), (*value, "model"), scale=0.02 / (2 * depth) ** 0.5),
        decay_down=down(c.decay_rank),
        gate_down=down(c.gate_rank),
    )


def mix_delta(
    w: DeltaAttention, c: DeltaNet, x: Float[Array, "B T D"], rotary: None, attend: Recur, state: Any, i: int
) -> tuple[Any, Float[Array, "B T D"]]:
    """The recurrence of layer i over normed x, and attend's new state."""
    q, k = (einsum("btd,dkh->btkh", x, own) for own in (w.q, w.k))
    v = einsum("btd,dkgu->btkgu", x, w.v)
    rate = jax.nn.sigmoid(einsum("btd,dkg->btkg", x, w.rate, jnp.float32))
    new = RecurrentInputs((q, k, v.reshape(*v.shape[:3], -1)), (decays(w, x), rate))
    kernels = w.q_conv, w.k_conv, w.v_conv.reshape(c.key_heads, -1, c.kernel)
    own = Recurrence(c.state, tuple(map(Convolution, kernels)), jax.nn.silu, partial(terms, c))
    state, out = attend.recur(state, i, own, new)
    out = rms_norm(out.reshape(v.shape), w.norm.astype(jnp.float32), NormKind(eps=c.eps)) * gates(w, c, x)
    return state, einsum("btkgu,kgud->btd", out.astype(x.dtype), w.o)


def decays(w: DeltaAttention, x: Float[Array, "B T D"]) -> Float[Array, "B T K G ..."]:
    """Logarithms of what remains of the memory, of a head or of each of its key dimensions."""
    speed = jnp.exp(w.decay_log.astype(jnp.float32))[None, None]
    if w.decay_down is None:
        made = einsum("btd,dkg->btkg", x, w.decay, jnp.float32)
    else:
        inner, speed = einsum("btd,dr->btr", x, w.decay_down), speed[..., None]
        made = einsum("btr,rkgh->btkgh", inner, w.decay, jnp.float32)
    return -speed * jax.nn.softplus(biased(made, w.decay_bias.astype(jnp.float32)))


def gates(w: DeltaAttention, c: DeltaNet, x: Float[Array, "B T D"]) -> Float[Array, "B T K G U"]:
    """Gates that multiply the normed outputs."""
    x = x if w.gate_down is None else einsum("btd,dr->btr", x, w.gate_down)
    # in the model's dtype, as queries are: XLA joins products of one dtype, and copies odd ones to do so
    made = einsum("btd,dkgu->btkgu", x, w.gate).astype(jnp.float32)
    return jax.nn.silu(made) if c.gate == "silu" else jax.nn.sigmoid(made)


def terms(c: DeltaNet, parts: tuple[Any, ...], beside: tuple[Any, Any]) -> Terms:
    """Queries and keys of length one, of as many heads as values have."""
    q, k, v = parts
    B, T, N = *v.shape[:2], c.num_heads
    decay, rate = (x.reshape(B, T, N, *x.shape[4:]) for x in beside)
    q, k = (jnp.repeat(of_length_one(x), c.groups, axis=2) for x in (q, k))
    return Terms(q * c.key_size**-0.5, k, v.reshape(B, T, N, c.value_size), decay, rate)


def of_length_one(x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + EPS)

"""Gated DeltaNet: short convolutions, the gated delta rule, and a gate on its outputs."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..config import NormKind
from ..layers import add_bias, einsum, rms_norm
from ..tree import Spec, pytree
from .kinds import DeltaNet
from .linear import Terms
from .states import Convolution, Recurrence, RecurrentAttend, RecurrentInputs

LENGTH_EPS = 1e-6  # added to the squared lengths of queries and keys


@pytree
class DeltaAttention:
    """Projections of one layer, in which each of K key heads has G value heads.

    Gate and decay are projected from x, directly or through a rank.
    """

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
    """Return the specs of one gated DeltaNet layer in a model of `depth` layers."""
    K, G, H, U = c.key_heads, c.groups, c.key_size, c.value_size
    key, value = ("state_heads", "head"), ("state_heads", "group", "head")
    decay_sizes = (K, G) if c.decay_rank is None else (K, G, H)

    def conv_spec(sizes: tuple[int, ...], axes: tuple[str, ...]) -> Spec:
        return Spec((*sizes, c.kernel), (*axes, "kernel"), scale=0.5 / c.kernel**0.5)

    def down_spec(rank: int | None) -> Spec | None:
        return None if rank is None else Spec((D, rank), ("model", "rank"))

    def up_spec(rank: int | None, sizes: tuple[int, ...]) -> Spec:
        return Spec((rank or D, *sizes), ("rank" if rank else "model", *value[: len(sizes)]))

    return DeltaAttention(
        q=Spec((D, K, H), ("model", *key)),
        k=Spec((D, K, H), ("model", *key)),
        v=Spec((D, K, G, U), ("model", *value)),
        rate=Spec((D, K, G), ("model", *value[:2])),
        decay=up_spec(c.decay_rank, decay_sizes),
        gate=up_spec(c.gate_rank, (K, G, U)),
        q_conv=conv_spec((K, H), key),
        k_conv=conv_spec((K, H), key),
        v_conv=conv_spec((K, G, U), value),
        decay_log=Spec((K, G), value[:2]),
        decay_bias=Spec(decay_sizes, value[: len(decay_sizes)]),
        norm=Spec((U,), ("head",), mean=1.0, scale=0.0),
        o=Spec((K, G, U, D), (*value, "model"), scale=0.02 / (2 * depth) ** 0.5),
        decay_down=down_spec(c.decay_rank),
        gate_down=down_spec(c.gate_rank),
    )


def run_delta_net(
    w: DeltaAttention,
    c: DeltaNet,
    x: Float[Array, "B T D"],
    rotary: None,
    attend: RecurrentAttend,
    state: Any,
    i: int,
) -> tuple[Any, Float[Array, "B T D"]]:
    """Run the recurrence of layer i over normed x. Returns attend's new state, and the output."""
    q, k = (einsum("btd,dkh->btkh", x, weight) for weight in (w.q, w.k))
    v = einsum("btd,dkgu->btkgu", x, w.v)
    rate = jax.nn.sigmoid(einsum("btd,dkg->btkg", x, w.rate, jnp.float32))
    inputs = RecurrentInputs((q, k, v.reshape(*v.shape[:3], -1)), (log_decays(w, x), rate))
    kernels = w.q_conv, w.k_conv, w.v_conv.reshape(c.key_heads, -1, c.kernel)
    recurrence = Recurrence(
        c.state_shapes, tuple(map(Convolution, kernels)), jax.nn.silu, partial(delta_terms, c)
    )
    state, out = attend.run_recurrence(state, i, recurrence, inputs)
    out = rms_norm(out.reshape(v.shape), w.norm.astype(jnp.float32), NormKind(eps=c.eps)) * output_gates(
        w, c, x
    )
    return state, einsum("btkgu,kgud->btd", out.astype(x.dtype), w.o)


def log_decays(w: DeltaAttention, x: Float[Array, "B T D"]) -> Float[Array, "B T K G ..."]:
    """Return the logarithms of the decay of the memory, one per head or per key dimension."""
    speed = jnp.exp(w.decay_log.astype(jnp.float32))[None, None]
    if w.decay_down is None:
        projected = einsum("btd,dkg->btkg", x, w.decay, jnp.float32)
    else:
        inner, speed = einsum("btd,dr->btr", x, w.decay_down), speed[..., None]
        projected = einsum("btr,rkgh->btkgh", inner, w.decay, jnp.float32)
    return -speed * jax.nn.softplus(add_bias(projected, w.decay_bias.astype(jnp.float32)))


def output_gates(w: DeltaAttention, c: DeltaNet, x: Float[Array, "B T D"]) -> Float[Array, "B T K G U"]:
    """Return the gates that multiply the normed outputs."""
    x = x if w.gate_down is None else einsum("btd,dr->btr", x, w.gate_down)
    # in the model's dtype, like queries: XLA merges products of one dtype (dot merger), and would copy others
    projected = einsum("btd,dkgu->btkgu", x, w.gate).astype(jnp.float32)
    return jax.nn.silu(projected) if c.gate == "silu" else jax.nn.sigmoid(projected)


def delta_terms(c: DeltaNet, conv_outputs: tuple[Any, ...], extras: tuple[Any, Any]) -> Terms:
    """Return the terms of the recurrence: queries and keys of length one, repeated for each value head."""
    q, k, v = conv_outputs
    B, T, N = *v.shape[:2], c.num_heads
    decay, rate = (x.reshape(B, T, N, *x.shape[4:]) for x in extras)
    q, k = (jnp.repeat(l2_normalise(x), c.groups, axis=2) for x in (q, k))
    return Terms(q * c.key_size**-0.5, k, v.reshape(B, T, N, c.value_size), decay, rate)


def l2_normalise(x: Float[Array, "*rows H"]) -> Float[Array, "*rows H"]:
    """Scale vectors to length one (L2 norm)."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + LENGTH_EPS)

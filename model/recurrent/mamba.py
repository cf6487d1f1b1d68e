"""Mamba-2: short convolutions, a state whose decay depends on the input, and a gate on its outputs.

In terms of attention: C are queries, B keys, x values. Each token has a step. It multiplies the value, and
sets how much of the state decays.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ..config import NormKind
from ..layers import Norm, add_bias, apply_scale, einsum, normalise
from ..tree import Spec, pytree
from .kinds import Mamba
from .linear import Terms
from .states import Convolution, Recurrence, RecurrentAttend, RecurrentInputs


@pytree
class MambaMixer:
    """Projections of one layer, in which each of K key heads has G value heads. V is G times their size."""

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
    skip: Any  # [K,G], factor of the value that is added to the output
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
    """Return the specs of one Mamba-2 layer in a model of `depth` layers."""
    K, G, H, V = c.key_heads, c.groups, c.key_size, c.groups * c.value_size
    heads, step_axes = ("state_heads", "head"), ("state_heads", "group")

    def bias_spec(size: int, axes: tuple[str, str], is_present: bool) -> Spec | None:
        return Spec((K, size), axes, scale=0.0) if is_present else None

    def conv_spec(size: int) -> Spec:
        return Spec((K, size, c.kernel), (*heads, "kernel"), scale=0.5 / c.kernel**0.5)

    return MambaMixer(
        z=Spec((D, K, V), ("model", *heads)),
        v=Spec((D, K, V), ("model", *heads)),
        k=Spec((D, K, H), ("model", *heads)),
        q=Spec((D, K, H), ("model", *heads)),
        step=Spec((D, K, G), ("model", *step_axes)),
        v_conv=conv_spec(V),
        k_conv=conv_spec(H),
        q_conv=conv_spec(H),
        step_offset=Spec((K, G), step_axes),
        decay_log=Spec((K, G), step_axes),
        skip=Spec((K, G), step_axes, mean=1.0, scale=0.0),
        o=Spec((K, V, D), (*heads, "model"), scale=0.02 / (2 * depth) ** 0.5),
        norm=Spec((K, V), heads, mean=1.0, scale=0.0) if c.norm else None,
        z_bias=bias_spec(V, heads, c.bias),
        v_bias=bias_spec(V, heads, c.bias),
        k_bias=bias_spec(H, heads, c.bias),
        q_bias=bias_spec(H, heads, c.bias),
        step_bias=bias_spec(G, step_axes, c.bias),
        v_conv_bias=bias_spec(V, heads, c.conv_bias),
        k_conv_bias=bias_spec(H, heads, c.conv_bias),
        q_conv_bias=bias_spec(H, heads, c.conv_bias),
        o_bias=Spec((D,), ("model",), scale=0.0) if c.output_bias else None,
    )


def run_mamba(
    w: MambaMixer,
    c: Mamba,
    x: Float[Array, "B T D"],
    rotary: None,
    attend: RecurrentAttend,
    state: Any,
    i: int,
) -> tuple[Any, Float[Array, "B T D"]]:
    """Run the recurrence of layer i over normed x. Returns attend's new state, and the output."""

    def project(weight: Any, bias: Any, scale: float, dtype: Any = None) -> Float[Array, "B T K size"]:
        bias = None if bias is None else bias.astype(dtype or x.dtype)
        return apply_scale(add_bias(einsum("btd,dkh->btkh", x, weight, dtype), bias), scale)

    z_scale, v_scale, k_scale, q_scale, step_scale = c.scales
    conv_inputs = (
        project(w.v, w.v_bias, v_scale),
        project(w.k, w.k_bias, k_scale),
        project(w.q, w.q_bias, q_scale),
    )
    step = project(w.step, w.step_bias, step_scale, jnp.float32)
    step = jnp.clip(jax.nn.softplus(add_bias(step, w.step_offset.astype(jnp.float32))), *c.step_limits)
    decay = -jnp.exp(w.decay_log.astype(jnp.float32))[None, None] * step
    recurrence = Recurrence(
        c.state_shapes, mamba_convolutions(w), jax.nn.silu, partial(mamba_terms, c, w.skip)
    )
    state, out = attend.run_recurrence(state, i, recurrence, RecurrentInputs(conv_inputs, (decay, step)))
    out = gate_outputs(
        w, c, out.reshape(conv_inputs[0].shape), project(w.z, w.z_bias, z_scale).astype(jnp.float32)
    )
    return state, add_bias(einsum("btkv,kvd->btd", out.astype(x.dtype), w.o), w.o_bias)


def mamba_convolutions(w: MambaMixer) -> tuple[Convolution, ...]:
    """Return the short convolutions of values, keys and queries."""
    return (
        Convolution(w.v_conv, w.v_conv_bias),
        Convolution(w.k_conv, w.k_conv_bias),
        Convolution(w.q_conv, w.q_conv_bias),
    )


def mamba_terms(
    c: Mamba, skip: Float[Array, "K G"], conv_outputs: tuple[Any, ...], extras: tuple[Any, Any]
) -> Terms:
    """Return the terms of the recurrence: queries and keys repeated for each value head, and values times
    their steps."""
    v, k, q = conv_outputs
    B, T, N = *v.shape[:2], c.num_heads
    v = v.reshape(B, T, N, c.value_size)
    decay, step = (x.reshape(B, T, N) for x in extras)
    q, k = (jnp.repeat(x, c.groups, axis=2) for x in (q, k))
    skipped = v * skip.astype(jnp.float32).reshape(1, 1, N, 1)
    return Terms(q, k, v * step[..., None], decay, skip=skipped)


def gate_outputs(
    w: MambaMixer, c: Mamba, out: Float[Array, "B T K V"], z: Float[Array, "B T K V"]
) -> Float[Array, "B T K V"]:
    """Return the input of the last projection, in float32. A norm spans all values of a key head."""

    def norm_values(x: Float[Array, "B T K V"]) -> Float[Array, "B T K V"]:
        return normalise(x, Norm(w.norm.astype(jnp.float32)), NormKind(eps=c.eps))

    if c.norm == "then gated":
        return norm_values(out) * jax.nn.silu(z)
    out = out * jax.nn.silu(z)
    return out if c.norm is None else norm_values(out)

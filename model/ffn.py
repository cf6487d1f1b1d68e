"""Feed-forward layers, gated or plain, and their activations."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .config import Dense
from .layers import Weight, add_bias, apply_scale, einsum, einsums, mapped_einsum, prevent_fma
from .tree import Spec, pytree

CLAMPED_SLOPE = 1.702  # of the sigmoid in gpt-oss


@pytree
class FFN:
    """Projections of a feed-forward layer. `gate` is None if it is plain."""

    gate: Any  # [D,F]
    up: Any  # [D,F]
    down: Any  # [F,D]
    gate_bias: Any = None  # [F]
    up_bias: Any = None  # [F]
    down_bias: Any = None  # [D]
    output_gate: Any = None  # [D]

    @property
    def matrices(self) -> tuple[Any, ...]:
        """Return the projections that there are."""
        return tuple(w for w in (self.gate, self.up, self.down) if w is not None)


def ffn_spec(c: Dense, D: int, depth: int) -> FFN:
    """Return the specs of one feed-forward layer in a model of `depth` layers."""

    def bias_spec(size: int, axis: str, is_present: bool = True) -> Spec | None:
        return Spec((size,), (axis,), scale=0.0) if c.bias and is_present else None

    F = c.size
    return FFN(
        gate=Spec((D, F), ("model", "ffn")) if c.gated else None,
        up=Spec((D, F), ("model", "ffn")),
        down=Spec((F, D), ("ffn", "model"), scale=0.02 / (2 * depth) ** 0.5),
        gate_bias=bias_spec(F, "ffn", c.gated),
        up_bias=bias_spec(F, "ffn"),
        down_bias=bias_spec(D, "model"),
        output_gate=Spec((D,), ("model",)) if c.output_gate else None,
    )


def activate(
    c: Dense, gate: Float[Array, "*rows F"] | None, up: Float[Array, "*rows F"]
) -> Float[Array, "*rows F"]:
    """Compute the inner values: the activation of `gate` times `up`, or of `up` alone. Rounds once."""
    kind, dtype = c.activation, up.dtype
    gate, up = None if gate is None else gate.astype(jnp.float32), up.astype(jnp.float32)
    if kind == "clamped_silu":  # gpt-oss
        assert gate is not None and c.clamp is not None
        gate, up = jnp.minimum(gate, c.clamp), jnp.clip(up, -c.clamp, c.clamp)
        return (gate * jax.nn.sigmoid(CLAMPED_SLOPE * gate) * (up + 1)).astype(dtype)
    inner = up if gate is None else gate
    if kind == "silu":
        inner = jax.nn.silu(inner)
    elif kind == "relu":
        inner = jax.nn.relu(inner)
    elif kind == "relu2":  # So et al., Primer, arXiv 2109.08668
        inner = jnp.square(jax.nn.relu(inner))
    else:
        inner = jax.nn.gelu(inner, approximate=kind == "gelu_tanh")
    return (inner if gate is None else inner * up).astype(dtype)


def project_down(
    w: FFN, c: Dense, gate: Float[Array, "*rows F"] | None, up: Float[Array, "*rows F"]
) -> Float[Array, "*rows D"]:
    """Compute the product of the inner values, without a bias."""
    equation = "...f,fd->...d"
    if c.activation == "gelu":  # Triton's compiler has no erfc
        return einsum(equation, activate(c, gate, up), w.down)
    inputs = [x for x in (gate, up) if x is not None]
    return mapped_einsum(equation, activation(c), inputs, w.down)


@cache
def activation(c: Dense) -> Callable[..., Float[Array, "..."]]:
    """Return the activation as a function of the gate, if there is one, and of the up projection.

    Equal layers have the same function.
    """
    return partial(activate, c) if c.gated else partial(activate, c, None)


def score_output(gate: Float[Array, " D"] | Weight, x: Float[Array, "*rows D"]) -> Float[Array, "*rows 1"]:
    """Compute the score of an output gate in float32."""
    if isinstance(gate, Weight):
        return gate.einsum("...d,d->...", x, jnp.float32)[..., None]
    gate = jnp.expand_dims(gate.astype(jnp.float32), range(x.ndim - 1))
    return jnp.sum(x.astype(jnp.float32) * gate, axis=-1, keepdims=True)


def feed_forward(w: FFN, c: Dense, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """Compute a feed-forward layer, its output gate included."""
    gate, up = einsums("...d,df->...f", x, (w.gate, w.up))
    gate = None if gate is None else apply_scale(add_bias(gate, w.gate_bias), c.gate_scale)
    out = apply_scale(add_bias(project_down(w, c, gate, add_bias(up, w.up_bias)), w.down_bias), c.scale)
    if w.output_gate is None:
        return out
    score = score_output(w.output_gate, x)
    return prevent_fma(out.astype(jnp.float32) * jax.nn.sigmoid(score)).astype(out.dtype)

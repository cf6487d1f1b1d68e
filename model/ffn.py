"""Feed-forward layers, gated or plain, their activations, and gates of outputs."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from .config import Dense
from .layers import Weight, add_bias, apply_scale, einsum, einsums, mapped_einsum, prevent_fma
from .tree import Spec, pytree

CLAMPED_SLOPE = 1.702  # of the sigmoid in gpt-oss
UNMAPPED_ACTIVATIONS = "gelu", "xielu"  # Triton's compiler has no erfc; xIELU has learned numbers


@pytree
class Slopes:
    """Numbers of xIELU (Huang and Schlag, arXiv 2411.13010). A softplus makes the first two positive."""

    positive: Any  # [1], slope of the square where the input is positive
    negative: Any  # [1], slope of the exponential where it is not, beyond `linear`
    linear: Any  # [1], slope of the linear part
    limit: Any  # [1], highest input of the exponential


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
    slopes: Any = None  # Slopes, of xIELU

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
        slopes=slopes_spec() if c.activation == "xielu" else None,
    )


def activate(
    c: Dense, gate: Float[Array, "*rows F"] | None, up: Float[Array, "*rows F"], slopes: Slopes | None = None
) -> Float[Array, "*rows F"]:
    """Compute the inner values: the activation of `gate` times `up`, or of `up` alone. Rounds once.

    slopes: those of xIELU.
    """
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
    elif kind == "xielu":
        assert slopes is not None
        inner = xielu(slopes, inner)
    else:
        inner = jax.nn.gelu(inner, approximate=kind == "gelu_tanh")
    return (inner if gate is None else inner * up).astype(dtype)


def project_down(
    w: FFN, c: Dense, gate: Float[Array, "*rows F"] | None, up: Float[Array, "*rows F"]
) -> Float[Array, "*rows D"]:
    """Compute the product of the inner values, without a bias."""
    equation = "...f,fd->...d"
    if c.activation in UNMAPPED_ACTIVATIONS:
        return einsum(equation, activate(c, gate, up, w.slopes), w.down)
    inputs = [x for x in (gate, up) if x is not None]
    return mapped_einsum(equation, activation(c), inputs, w.down)


@cache
def activation(c: Dense) -> Callable[..., Float[Array, "..."]]:
    """Return the activation as a function of the gate, if there is one, and of the up projection.

    Equal layers have the same function.
    """
    return partial(activate, c) if c.gated else partial(activate, c, None)


def slopes_spec() -> Slopes:
    """Return the specs of xIELU's numbers: slopes of 0.8 where nothing is learned yet."""
    means = (0.2032, -1.0502, 0.5, -1e-6)
    return Slopes(*[Spec((1,), ("one",), mean=mean, scale=0.0) for mean in means])


def xielu(slopes: Slopes, x: Float32[Array, "*rows F"]) -> Float32[Array, "*rows F"]:
    """Compute xIELU: a square with a learned slope where x is positive, and an exponential elsewhere."""
    positive, negative, linear, limit = (
        s.astype(jnp.float32).reshape((1,) * x.ndim)
        for s in (slopes.positive, slopes.negative, slopes.linear, slopes.limit)
    )
    square = prevent_fma(jax.nn.softplus(positive) * x * x)
    bend = prevent_fma((jnp.expm1(jnp.minimum(x, limit)) - x) * (linear + jax.nn.softplus(negative)))
    return jnp.where(x > 0, square, bend) + prevent_fma(linear * x)


def score_output(gate: Float[Array, " D"] | Weight, x: Float[Array, "*rows D"]) -> Float[Array, "*rows 1"]:
    """Compute the score of an output gate in float32."""
    if isinstance(gate, Weight):
        return gate.einsum("...d,d->...", x, jnp.float32)[..., None]
    gate = jnp.expand_dims(gate.astype(jnp.float32), range(x.ndim - 1))
    return jnp.sum(x.astype(jnp.float32) * gate, axis=-1, keepdims=True)


def compute_gates(
    gate: Any, bias: Any, head_gate: Any, x: Float[Array, "B T D"], activation: str
) -> Float[Array, "B T heads _"]:
    """Compute the factors of attention's output: one for each dimension of a head, or one for each head."""
    if head_gate is None:
        gates = add_bias(einsum("btd,dnh->btnh", x, gate), bias)
    else:
        gates = einsum("btd,dn->btn", x, head_gate)[..., None]
    if activation == "sigmoid":
        return jax.nn.sigmoid(gates)
    return jax.nn.softplus(gates.astype(jnp.float32)).astype(gates.dtype)


def feed_forward(w: FFN, c: Dense, x: Float[Array, "*rows D"]) -> Float[Array, "*rows D"]:
    """Compute a feed-forward layer, its output gate included."""
    gate, up = einsums("...d,df->...f", x, (w.gate, w.up))
    gate = None if gate is None else apply_scale(add_bias(gate, w.gate_bias), c.gate_scale)
    out = apply_scale(add_bias(project_down(w, c, gate, add_bias(up, w.up_bias)), w.down_bias), c.scale)
    if w.output_gate is None:
        return out
    score = score_output(w.output_gate, x)
    return prevent_fma(out.astype(jnp.float32) * jax.nn.sigmoid(score)).astype(out.dtype)

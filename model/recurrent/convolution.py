"""Gated short convolutions: o(after * convolution(before * v)), all three projected from the input."""

from typing import Any

from jaxtyping import Array, Float

from ..layers import add_bias, einsum
from ..tree import Spec, pytree
from .kinds import ShortConv
from .states import Convolution, Recurrence, RecurrentAttend, RecurrentInputs


@pytree
class ShortConvolution:
    """Projections of one layer and its convolution. The D channels stand as K heads of H."""

    before: Any  # [D,K,H], of what multiplies the inputs
    after: Any  # [D,K,H], of what multiplies the outputs
    v: Any  # [D,K,H]
    conv: Any  # [K,H,kernel]
    o: Any  # [K,H,D]
    before_bias: Any = None  # [K,H]
    after_bias: Any = None  # [K,H]
    v_bias: Any = None  # [K,H]
    conv_bias: Any = None  # [K,H]
    o_bias: Any = None  # [D]


def convolution_spec(c: ShortConv, D: int, depth: int) -> ShortConvolution:
    """Return the specs of one gated short convolution in a model of `depth` layers."""
    K, H, axes = c.heads, c.size, ("state_heads", "head")
    projection = Spec((D, K, H), ("model", *axes))
    bias = Spec((K, H), axes, scale=0.0) if c.bias else None
    return ShortConvolution(
        before=projection,
        after=projection,
        v=projection,
        conv=Spec((K, H, c.kernel), (*axes, "kernel"), scale=0.5 / c.kernel**0.5),
        o=Spec((K, H, D), (*axes, "model"), scale=0.02 / (2 * depth) ** 0.5),
        before_bias=bias,
        after_bias=bias,
        v_bias=bias,
        conv_bias=bias,
        o_bias=Spec((D,), ("model",), scale=0.0) if c.bias else None,
    )


def run_short_conv(
    w: ShortConvolution,
    c: ShortConv,
    x: Float[Array, "B T D"],
    rotary: None,
    attend: RecurrentAttend,
    state: Any,
    i: int,
) -> tuple[Any, Float[Array, "B T D"]]:
    """Run the convolution of layer i over normed x. Returns attend's new state, and the output."""

    def project(weight: Any, bias: Any) -> Float[Array, "B T K H"]:
        return add_bias(einsum("btd,dkh->btkh", x, weight), bias)

    before, after = project(w.before, w.before_bias), project(w.after, w.after_bias)
    inputs = RecurrentInputs((before * project(w.v, w.v_bias),))
    recurrence = Recurrence(c.state_shapes, (Convolution(w.conv, w.conv_bias),))
    state, out = attend.run_recurrence(state, i, recurrence, inputs)
    out = after * out.astype(x.dtype)
    return state, add_bias(einsum("btkh,khd->btd", out, w.o), w.o_bias)

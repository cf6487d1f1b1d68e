"""Gated short convolutions: o(after * convolution(before * v)), all three made from the input."""

from typing import Any

from jaxtyping import Array, Float

from ..layers import biased, einsum
from ..tree import Spec, pytree
from .kinds import ShortConv
from .states import Convolution, Recur, Recurrence, RecurrentInputs


@pytree
class ShortConvolution:
    """Projections of one layer and its convolution, the D channels as K heads of H."""

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
    """The parameters of one layer of `depth`."""
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


def mix_convolution(
    w: ShortConvolution,
    c: ShortConv,
    x: Float[Array, "B T D"],
    rotary: None,
    attend: Recur,
    state: Any,
    i: int,
) -> tuple[Any, Float[Array, "B T D"]]:
    """The convolution of layer i over normed x, and attend's new state."""

    def projected(own: Any, bias: Any) -> Float[Array, "B T K H"]:
        return biased(einsum("btd,dkh->btkh", x, own), bias)

    before, after = projected(w.before, w.before_bias), projected(w.after, w.after_bias)
    new = RecurrentInputs((before * projected(w.v, w.v_bias),))
    own = Recurrence(c.state, (Convolution(w.conv, w.conv_bias),))
    state, out = attend.recur(state, i, own, new)
    out = after * out.astype(x.dtype)
    return state, biased(einsum("btkh,khd->btd", out, w.o), w.o_bias)

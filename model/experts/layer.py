"""A layer of experts."""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxtyping import Array, Float, Int

from ..config import Experts
from ..layers import Norm, NormWeight, normalise, scaled
from .mixture import LocalExperts, MoE, add_all, route, shared_output
from .parts import add_parts

TILE, LARGE_TILE = 8, 32  # rows of one expert's product: while decoding, and for chunks of prompts


def mix_experts(w: MoE, c: Experts, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The chosen experts' outputs, weighted and added in order of their scores, and the shared one's."""
    flat = x.reshape(-1, x.shape[-1])
    tile = TILE if x.shape[1] == 1 else LARGE_TILE
    if w.norms is not None:
        return apart(w, c, flat, tile).reshape(x.shape)
    weights, chosen = routed(w, c, flat)
    return adding(w)(LocalExperts(w.experts, w.shared), flat, weights, chosen, c, tile).reshape(x.shape)


def routed(
    w: MoE, c: Experts, x: Float[Array, "tokens D"]
) -> tuple[Float[Array, "tokens A"], Int[Array, "tokens A"]]:
    """`route`, after the router's own norm if the layer has one."""
    if c.norms is None or w.norms is None:
        return route(w, c, x)
    return route(w, c, scaled(normalise(x, w.norms.router, c.norms), x.shape[-1] ** -0.5))


def chosen_experts(w: MoE, c: Experts, x: Float[Array, "B T D"]) -> Int[Array, "B T A"]:
    """Numbers of the experts that `mix_experts` chooses; in one program they are computed once."""
    return routed(w, c, x.reshape(-1, x.shape[-1]))[1].reshape(*x.shape[:-1], c.active)


def adding(w: MoE) -> Callable[..., Any]:
    return add_all if w.parts is None else partial(add_parts, w.parts)


def apart(w: MoE, c: Experts, x: Float[Array, "tokens D"], tile: int) -> Float[Array, "tokens D"]:
    """The same where experts and shared expert have norms of their own: each sum is whole before it is
    normed."""

    def normed(x: Float[Array, "tokens D"], norm: Norm | NormWeight) -> Float[Array, "tokens D"]:
        assert c.norms is not None
        return normalise(x, norm, c.norms)

    weights, chosen = routed(w, c, x)
    experts = adding(w)(LocalExperts(w.experts, None), normed(x, w.norms.experts), weights, chosen, c, tile)
    mixed = normed(experts, w.norms.experts_post)
    if w.shared is None:
        return mixed
    shared = shared_output(w.shared, c, normed(x, w.norms.shared))
    return mixed + normed(shared, w.norms.shared_post)

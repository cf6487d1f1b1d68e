"""A layer of experts."""

from functools import partial

from jaxtyping import Array, Float

from ..config import Experts
from .mixture import Held, MoE, add_all, route
from .parts import add_parts

TILE, LARGE_TILE = 8, 32  # rows of one expert's product: while decoding, and for chunks of prompts


def mix_experts(w: MoE, c: Experts, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The chosen experts' outputs, weighted and added in order of their scores, and the shared one's."""
    flat = x.reshape(-1, x.shape[-1])
    weights, chosen = route(w, c, flat)
    tile = TILE if x.shape[1] == 1 else LARGE_TILE
    add = add_all if w.parts is None else partial(add_parts, w.parts)
    return add(Held(w.experts, w.shared), flat, weights, chosen, c, tile).reshape(x.shape)

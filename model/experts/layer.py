"""The layer of a mixture of experts: routing, the sum of the chosen experts, and their norms."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..config import Experts
from ..layers import Norm, NormWeight, apply_scale, normalise
from .mixture import LocalExperts, MoE, route_tokens, run_shared_expert, sum_chosen_experts
from .sharded import sum_sharded_experts

DECODE_TILE_ROWS, PREFILL_TILE_ROWS = 8, 32  # rows of a tile of one expert: in decode, and in prefill


def run_moe(w: MoE, c: Experts, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Add up the chosen experts' weighted outputs in order of their scores, and the shared expert's. Norm the
    sum if the layer does."""
    flat = x.reshape(-1, x.shape[-1])
    tile = DECODE_TILE_ROWS if x.shape[1] == 1 else PREFILL_TILE_ROWS
    if w.norms is not None:
        return run_moe_separate_norms(w, c, flat, tile).reshape(x.shape)
    weights, chosen = norm_and_route(w, c, flat)
    experts = LocalExperts(w.experts, w.shared)
    out = choose_expert_sum(w)(experts, flat, weights, chosen, c, tile).reshape(x.shape)
    return (
        out
        if c.output_norm is None or w.output_norm is None
        else normalise(out, w.output_norm, c.output_norm)
    )


def norm_and_route(
    w: MoE, c: Experts, x: Float[Array, "tokens D"]
) -> tuple[Float[Array, "tokens A"], Int[Array, "tokens A"]]:
    """Route tokens as `route_tokens`, after the router's own norm if the layer has one."""
    if c.norms is None or w.norms is None:
        return route_tokens(w, c, x)
    # in float32: XLA would drop the rounding of a 16-bit product in some programs (excess precision)
    normed = normalise(x, w.norms.router, c.norms).astype(jnp.float32)
    return route_tokens(w, c, apply_scale(normed, x.shape[-1] ** -0.5))


def chosen_expert_ids(w: MoE, c: Experts, x: Float[Array, "B T D"]) -> Int[Array, "B T A"]:
    """Return the numbers of the experts that `run_moe` chooses. Within one program XLA computes them
    once."""
    return norm_and_route(w, c, x.reshape(-1, x.shape[-1]))[1].reshape(*x.shape[:-1], c.active)


def choose_expert_sum(w: MoE) -> Callable[..., Any]:
    """Return the function that adds up experts: `sum_chosen_experts` on one device, `sum_sharded_experts` on
    several."""
    return sum_chosen_experts if w.expert_axes is None else partial(sum_sharded_experts, w.expert_axes)


def run_moe_separate_norms(
    w: MoE, c: Experts, x: Float[Array, "tokens D"], tile: int
) -> Float[Array, "tokens D"]:
    """Run a mixture whose routed and shared experts have their own pre- and post-norms.

    Each post-norm needs a complete sum, so the two are not accumulated together.
    """

    def norm_tokens(x: Float[Array, "tokens D"], norm: Norm | NormWeight) -> Float[Array, "tokens D"]:
        assert c.norms is not None
        return normalise(x, norm, c.norms)

    weights, chosen = norm_and_route(w, c, x)
    experts = choose_expert_sum(w)(
        LocalExperts(w.experts, None), norm_tokens(x, w.norms.experts), weights, chosen, c, tile
    )
    mixed = norm_tokens(experts, w.norms.experts_post)
    if w.shared is None:
        return mixed
    shared = run_shared_expert(w.shared, c, norm_tokens(x, w.norms.shared))
    return mixed + norm_tokens(shared, w.norms.shared_post)

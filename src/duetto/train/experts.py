"""Mixtures of experts that choose and weigh experts as an engine's step, with derivatives of XLA's.

A router that reads other activations than the sampler's may choose other experts. Here the activations are
the sampler's, and so are the choices.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from ..model.config import Experts
from ..model.experts.mixture import (
    MoE,
    compute_expert_scores,
    compute_router_logits,
    route_tokens,
    run_experts_ragged,
    weigh_experts,
)
from ..model.ffn import FFN
from ..model.tree import pytree, static
from ..model.weights.cpu.packed import EXPERT_NAMES, pack_weight
from .tiles import map_row_tiles


@pytree
class TrainableExperts:
    """Experts side by side, multiplied by CPU kernels, with the derivatives of XLA's products.

    target: the kernel's name for XLA; "": XLA multiplies.
    """

    ffn: FFN
    target: str = static("")

    def route(
        self, w: MoE, c: Experts, x: Float[Array, "tokens D"]
    ) -> tuple[Float[Array, "tokens A"], Int[Array, "tokens A"]]:
        """Route tokens as `route_tokens`, and with its bits in steps of few rows if kernels multiply."""
        router: Any = replace(w, experts=None, shared=None, norms=None, output_norm=None)
        return route_rows(c, router, x) if self.target else route_tokens(router, c, x)

    def run_chosen(
        self, c: Experts, x: Float[Array, "tokens D"], chosen: Int[Array, "tokens A"]
    ) -> Float[Array, "tokens A D"]:
        """Run each token through each of its experts, as `run_chosen_experts`."""
        return run_experts(c, self.target, self.ffn, x, chosen)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_experts(
    c: Experts, target: str, ffn: FFN, x: Float[Array, "tokens D"], chosen: Int[Array, "tokens A"]
) -> Float[Array, "tokens A D"]:
    """Run each token through each of its experts by a kernel."""
    weights = {name: getattr(ffn, name) for name in EXPERT_NAMES if target}
    packed = {
        name: pack_weight(name, w, target, is_expert=True) for name, w in weights.items() if w is not None
    }
    return run_experts_ragged(replace(ffn, **packed), c, x, chosen)


def _run_experts_backward(c: Experts, target: str, operands: Any, g: Any) -> Any:
    *others, chosen = operands
    return *jax.vjp(lambda ffn, x: run_experts_ragged(ffn, c, x, chosen), *others)[1](g), None


run_experts.defvjp(
    lambda c, target, *operands: (run_experts(c, target, *operands), operands), _run_experts_backward
)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def route_rows(
    c: Experts, w: MoE, x: Float[Array, "tokens D"]
) -> tuple[Float[Array, "tokens A"], Int[Array, "tokens A"]]:
    """Route tokens in tiles, as `route_tokens`."""
    return map_row_tiles(lambda tile: route_tokens(w, c, tile), x)


def _route_forward(c: Experts, w: MoE, x: Any) -> Any:
    routes = route_rows(c, w, x)
    return routes, (w, x, routes[1])  # pyright: ignore[reportIndexIssue]


def _route_backward(c: Experts, operands: Any, g: Any) -> Any:
    w, x, chosen = operands

    def weigh(w: MoE, x: Float[Array, "tokens D"]) -> Float[Array, "tokens A"]:
        return weigh_experts(w, c, compute_expert_scores(c, compute_router_logits(w, x)), chosen)

    return jax.vjp(weigh, w, x)[1](g[0])


route_rows.defvjp(_route_forward, _route_backward)

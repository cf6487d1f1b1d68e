"""Mixtures of experts, on one device and on several."""

from .layer import chosen_expert_ids, run_moe
from .mixture import (
    MoE,
    experts_spec,
    has_expert_kernel,
    run_experts_ragged,
    run_experts_tiled,
    sort_by_expert,
)
from .sharded import ExpertAxes, drop_expert_axes, inner_dims, with_expert_axes

__all__ = [
    "ExpertAxes",
    "MoE",
    "chosen_expert_ids",
    "drop_expert_axes",
    "experts_spec",
    "has_expert_kernel",
    "inner_dims",
    "run_experts_ragged",
    "run_experts_tiled",
    "run_moe",
    "sort_by_expert",
    "with_expert_axes",
]

"""Mixtures of experts, on one device and on several."""

from .layer import chosen_experts, mix_experts
from .mixture import MoE, by_ragged_products, by_tiles, experts_spec, has_kernel, sorted_by_expert
from .parts import ExpertAxes, inner_dims, parted, unparted

__all__ = [
    "ExpertAxes",
    "MoE",
    "by_ragged_products",
    "by_tiles",
    "chosen_experts",
    "experts_spec",
    "has_kernel",
    "inner_dims",
    "mix_experts",
    "parted",
    "sorted_by_expert",
    "unparted",
]

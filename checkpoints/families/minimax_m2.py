"""MiniMax-M2 (MiniMax, 2025): mixtures of experts that a sigmoid and a correction choose; queries and keys
are normed over all heads, and turned in part."""

from typing import Any

from ...model.config import LayerKind, ModelConfig
from ...refusals import shown
from . import fields, parts
from .family import Family
from .stored import Stored

CORRECTION = Stored(parts.LAYER + "block_sparse_moe.e_score_correction_bias", "E->E")
EXPERTS = parts.experts("block_sparse_moe", "w1", "w3", "w2") | {"layers.{}.ffn.correction": CORRECTION}
ONLY = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
}


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' MiniMaxM2Config."""
    for name, value in ONLY.items():
        fields.only(raw, name, value)
    types = fields.value(raw, "attn_type_list", [])
    if not isinstance(types, list) or any(kind != 1 for kind in types):
        raise ValueError(f"attn_type_list is {shown(types)}, which is not supported: expected a list of 1")
    norm, size = parts.rms(raw), fields.head_size(raw, 128)
    share = fields.integer(raw, "rotary_dim", size, most=size) / size
    kinds: dict[str, Any] = {"kv_heads": 8, "qk_norm": norm, "qk_norm_over": "all heads"}
    attention = parts.partly_turned(raw, size, length=196608, share=share, theta=5e6, **kinds)
    count = fields.experts(raw, fields.named(raw, "num_local_experts", "num_experts"), 256)
    inner = fields.integer(raw, "intermediate_size")
    experts = parts.mixture(raw, count, 8, inner, scoring="sigmoid", correction=True)
    return parts.decoder(raw, LayerKind(attention, experts), max_position=196608, norm=norm)


FAMILY = Family(config, parts.BACKBONE | parts.WIDE_QK_NORMS | EXPERTS, parts.IGNORED + parts.BEYOND)

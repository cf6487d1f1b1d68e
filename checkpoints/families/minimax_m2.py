"""MiniMax-M2 (MiniMax, 2025): mixtures of experts that are chosen by a sigmoid and a correction. Queries and
keys are normed over all heads, and a part of each head is rotated."""

from typing import Any

from ...model.config import LayerKind, ModelConfig
from ...refusals import quote
from . import fields, parts
from .family import Family
from .storage import Stored

CORRECTION = Stored(parts.LAYER + "block_sparse_moe.e_score_correction_bias", "E->E")
EXPERTS = parts.expert_names("block_sparse_moe", "w1", "w3", "w2") | {"layers.{}.ffn.correction": CORRECTION}
FIXED_FIELDS = {
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "use_routing_bias": True,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' MiniMaxM2Config."""
    for name, value in FIXED_FIELDS.items():
        fields.allow_only(raw, name, value)
    types = fields.value(raw, "attn_type_list", [])
    if not isinstance(types, list) or any(kind != 1 for kind in types):
        raise ValueError(f"attn_type_list is {quote(types)}, which is not supported: expected a list of 1")
    norm, size = parts.rms_norm_config(raw), fields.head_size(raw, 128)
    share = fields.integer(raw, "rotary_dim", size, maximum=size) / size
    kinds: dict[str, Any] = {"kv_heads": 8, "qk_norm": norm, "qk_norm_over": "all heads"}
    attention = parts.partial_rotary_attention_config(
        raw, size, length=196608, share=share, theta=5e6, **kinds
    )
    count = fields.expert_count(raw, fields.present_name(raw, "num_local_experts", "num_experts"), 256)
    inner = fields.integer(raw, "intermediate_size")
    experts = parts.experts_config(raw, count, 8, inner, scoring="sigmoid", correction=True)
    return parts.model_config(raw, LayerKind(attention, experts), max_position=196608, norm=norm)


FAMILY = Family(parse_config, parts.BACKBONE | parts.WIDE_QK_NORMS | EXPERTS, parts.MTP_LAYERS)

"""MiniMax-M2 (MiniMax, 2025): mixtures of experts that a sigmoid and a correction choose; queries and keys
are normed over all heads, and turned in part."""

from ...model.config import Experts, LayerKind, ModelConfig
from ...refusals import shown
from . import fields, parts
from .family import Family
from .ropes import rope, rotary_size
from .stored import Stored

CORRECTION = Stored(parts.LAYER + "block_sparse_moe.e_score_correction_bias", "E->E")
NAMES = (
    parts.BACKBONE
    | parts.experts("block_sparse_moe", "w1", "w3", "w2")
    | {
        "layers.{}.attention.q_norm": Stored(parts.LAYER + "self_attn.q_norm.weight", "NH->NH"),
        "layers.{}.attention.k_norm": Stored(parts.LAYER + "self_attn.k_norm.weight", "KH->KH"),
        "layers.{}.ffn.correction": CORRECTION,
    }
)
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
    turned = rotary_size(raw, size, fields.integer(raw, "rotary_dim", size, most=size) / size)
    attention = parts.grouped_query(
        raw,
        rope(raw, turned, length=196608, theta=5e6, partial=True),
        size,
        kv_heads=8,
        rotary_size=turned,
        qk_norm=norm,
        qk_norm_over="all heads",
    )
    return parts.decoder(raw, LayerKind(attention, experts(raw)), max_position=196608, norm=norm)


def experts(raw: fields.Raw) -> Experts:
    return Experts(
        count=fields.experts(raw, fields.named(raw, "num_local_experts", "num_experts"), 256),
        active=fields.integer(raw, "num_experts_per_tok", 8),
        size=fields.integer(raw, "intermediate_size"),
        activation=fields.activation(raw, "hidden_act", "silu"),
        scoring="sigmoid",
        correction=True,
    )


FAMILY = Family(config, NAMES, parts.IGNORED + parts.BEYOND)

"""Trinity (Arcee AI, 2025): attention whose output has a gate, a rope on the layers with a window only, norms
before and after each sublayer, and mixtures of experts that are chosen by a sigmoid and a correction."""

from typing import Any

from ...model.config import Dense, Experts, LayerKind, ModelConfig
from . import deepseek, fields, parts
from .family import Family
from .ropes import read_rope
from .storage import Stored

NORMS = parts.NORMS | {
    "layers.{}.attention_post_norm.gain": Stored(parts.LAYER + "post_attention_layernorm.weight", "D->D"),
    "layers.{}.ffn_norm.gain": Stored(parts.LAYER + "pre_mlp_layernorm.weight", "D->D"),
    "layers.{}.ffn_post_norm.gain": Stored(parts.LAYER + "post_mlp_layernorm.weight", "D->D"),
}
NAMES = (
    parts.BACKBONE
    | NORMS
    | parts.QK_NORMS
    | deepseek.MIXTURE
    | {
        "layers.{}.attention.gate": Stored(parts.LAYER + "self_attn.gate_proj.weight", "NH,D->DNH"),
        "layers.{}.ffn.router": Stored(parts.LAYER + "mlp.router.gate.weight", "E,D->DE"),
        "layers.{}.ffn.correction": Stored(parts.LAYER + "mlp.expert_bias", "E->E"),
    }
)
FIXED_FIELDS = {
    "attention_bias": False,
    "score_func": "sigmoid",
    "route_norm": True,
    "n_group": 1,
    "topk_group": 1,
    "num_expert_groups": 1,
    "num_limited_groups": 1,
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' AfmoeConfig."""
    for name, value in FIXED_FIELDS.items():
        fields.allow_only(raw, name, value)
    size, norm = parts.nullable_head_size(raw, 128), parts.rms_norm_config(raw, 1e-5)
    rope = read_rope(raw, size, length=16384)
    types = parts.sliding_pattern(raw, fields.integer(raw, "global_attn_every_n_layers", 4))
    window = fields.nullable(fields.integer, raw, "sliding_window", 1024)
    kinds: dict[str, Any] = {"qk_norm": norm, "gated": True}
    mixers = [
        parts.grouped_query_config(raw, rope if w else None, size, window=w, **kinds)
        for w in parts.windows(raw, types, window)
    ]
    layers = [LayerKind(mixer, ffn) for mixer, ffn in zip(mixers, ffn_configs(raw), strict=True)]
    scale = fields.integer(raw, "hidden_size") ** 0.5 if fields.flag(raw, "mup_enabled", False) else 1.0
    return parts.model_config(
        raw, layers, max_position=16384, norm=norm, post_norms=True, embedding_scale=scale
    )


def ffn_configs(raw: fields.Raw) -> list[Dense | Experts]:
    """Return each layer's feed-forward layer: the first `num_dense_layers` are dense."""
    first, size = (
        fields.non_negative_integer(raw, "num_dense_layers", 1),
        fields.integer(raw, "moe_intermediate_size", 1408),
    )
    count = fields.expert_count(raw, "num_experts", 64)
    factor = fields.number(raw, "route_scale", 1.0)
    shared = size * fields.expert_count(raw, "num_shared_experts", 2)
    kinds: dict[str, Any] = {"scoring": "sigmoid", "correction": True, "factor": factor, "shared": shared}
    experts = parts.experts_config(raw, count, 6, size, **kinds)
    return [parts.dense_ffn_config(raw) if i < first else experts for i in range(parts.num_layers(raw))]


FAMILY = Family(parse_config, NAMES)

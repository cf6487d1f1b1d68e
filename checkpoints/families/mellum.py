"""Mellum 2 (JetBrains, 2026): Qwen 3's mixtures of experts, with a window on some layers and a rope for each
kind of layer. Layers that predict several tokens ahead are left out."""

from typing import Any

from ...model.config import GroupedQuery, LayerKind, ModelConfig
from . import fields, parts, qwen3_moe
from .family import Family
from .ropes import read_rope_pair

THETAS = 500000.0, 10000.0


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' MellumConfig."""
    count = fields.expert_count(raw, fields.present_name(raw, "num_experts", "num_local_experts"), 64)
    normalised = fields.flag(raw, "norm_topk_prob", True)
    size = fields.integer(raw, "moe_intermediate_size", 896)
    experts = parts.experts_config(raw, count, 8, size, normalised=normalised)
    ffns = parts.typed_ffn_configs(raw, experts, parts.dense_head(raw, 0))
    layers = [LayerKind(mixer, ffn) for mixer, ffn in zip(mixers(raw), ffns, strict=True)]
    return parts.model_config(raw, layers, max_position=131072, norm=parts.rms_norm_config(raw))


def mixers(raw: fields.Raw) -> list[GroupedQuery]:
    """Return each layer's attention, by `layer_types`; all are full by default."""
    fields.allow_only(raw, "rope_scaling")
    size, bias = fields.head_size(raw, 128), fields.flag(raw, "attention_bias", False)
    norm, (full_rope, local_rope) = parts.rms_norm_config(raw), read_rope_pair(raw, size, 131072, THETAS)
    kinds: dict[str, Any] = {"kv_heads": 4, "qk_norm": norm, "bias": bias, "output_bias": bias}
    window = fields.nullable(fields.integer, raw, "sliding_window", 1024)
    types = ["full_attention"] * parts.num_layers(raw)
    return [
        parts.grouped_query_config(raw, local_rope if w else full_rope, size, window=w, **kinds)
        for w in parts.windows(raw, types, window)
    ]


FAMILY = Family(parse_config, qwen3_moe.NAMES, (r"mtp\..*",))

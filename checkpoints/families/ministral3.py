"""Ministral 3 (Mistral AI, 2025): Mistral with YaRN, and queries that grow with their position."""

from dataclasses import replace

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import find_rope, read_rope

LENGTH = 262144
ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Ministral3Config."""
    raw = {**raw, "rope_parameters": fields.value(raw, "rope_parameters", ROPE)}
    size, window = fields.head_size(raw, 128), parts.uniform_window(raw, None)
    base_rope = read_rope(raw, size, length=LENGTH)
    rope = replace(base_rope, query_growth=fields.number(find_rope(raw)[1], "llama_4_scaling_beta", 0.0))
    attention = parts.grouped_query_config(raw, rope, size, kv_heads=8, window=window)
    return parts.model_config(
        raw, LayerKind(attention, parts.dense_ffn_config(raw)), LENGTH, parts.rms_norm_config(raw, 1e-5)
    )


FAMILY = Family(parse_config, parts.LLAMA)

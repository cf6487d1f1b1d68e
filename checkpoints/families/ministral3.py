"""Ministral 3 (Mistral AI, 2025): Mistral with YaRN, and queries that grow with their position."""

from dataclasses import replace

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import rope

LENGTH = 262144
ROPE = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
    "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Ministral3Config."""
    raw = {**raw, "rope_parameters": fields.value(raw, "rope_parameters", ROPE)}
    size, window = fields.head_size(raw, 128), parts.one_window(raw, None)
    plain = rope(raw, size, length=LENGTH)
    turn = replace(plain, query_growth=fields.number(raw["rope_parameters"], "llama_4_scaling_beta", 0.0))
    attention = parts.grouped_query(raw, turn, size, kv_heads=8, window=window)
    return parts.decoder(raw, LayerKind(attention, parts.dense(raw)), LENGTH, parts.rms(raw, 1e-5))


FAMILY = Family(config, parts.LLAMA, parts.IGNORED)

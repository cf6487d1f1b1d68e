"""Mixtral (Jiang et al., arXiv 2401.04088): Mistral whose feed-forward layers are mixtures of experts."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import read_rope

NAMES = parts.BACKBONE | parts.expert_names("block_sparse_moe", "w1", "w3", "w2")


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' MixtralConfig."""
    size, window = fields.head_size(raw), parts.uniform_window(raw, None)
    rope = read_rope(raw, size, length=131072, theta=1e6)
    attention = parts.grouped_query_config(raw, rope, size, kv_heads=8, window=window)
    count = fields.expert_count(raw, "num_local_experts", fields.expert_count(raw, "num_experts", 8))
    experts = parts.experts_config(raw, count, 2, fields.integer(raw, "intermediate_size"))
    return parts.model_config(
        raw, LayerKind(attention, experts), max_position=131072, norm=parts.rms_norm_config(raw, 1e-5)
    )


FAMILY = Family(parse_config, NAMES)

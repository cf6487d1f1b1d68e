"""Mixtral (Jiang et al., arXiv 2401.04088): Mistral whose feed-forward layers are mixtures of experts."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import rope

NAMES = parts.BACKBONE | parts.experts("block_sparse_moe", "w1", "w3", "w2")


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' MixtralConfig."""
    size, window = fields.head_size(raw), parts.one_window(raw, None)
    turn = rope(raw, size, length=131072, theta=1e6)
    attention = parts.grouped_query(raw, turn, size, kv_heads=8, window=window)
    count = fields.experts(raw, "num_local_experts", fields.experts(raw, "num_experts", 8))
    experts = parts.mixture(raw, count, 2, fields.integer(raw, "intermediate_size"))
    return parts.decoder(raw, LayerKind(attention, experts), max_position=131072, norm=parts.rms(raw, 1e-5))


FAMILY = Family(config, NAMES, parts.IGNORED)

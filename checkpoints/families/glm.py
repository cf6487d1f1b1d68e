"""GLM-4-9B in transformers' form (arXiv 2406.12793): Llama with biases of queries, keys and values, and
joined projections. Neighbouring dimensions are rotated, in a part of each head."""

from dataclasses import replace

from ...model.config import GroupedQuery, LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import read_rope, rotary_size

NAMES = parts.BACKBONE | parts.QKV_BIASES | parts.GATE_UP


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' GlmConfig."""
    layer = LayerKind(attention_config(raw), parts.dense_ffn_config(raw))
    return parts.model_config(raw, layer, max_position=131072, norm=parts.rms_norm_config(raw, 1.5625e-7))


def attention_config(raw: fields.Raw) -> GroupedQuery:
    """Return attention that rotates neighbouring dimensions of a part of each head."""
    size = fields.head_size(raw, 128)
    rope_size = rotary_size(raw, size, 0.5)
    rope = replace(read_rope(raw, rope_size, length=131072, partial=True), interleaved=True)
    bias = fields.flag(raw, "attention_bias", True)
    return parts.grouped_query_config(raw, rope, size, kv_heads=2, rotary_size=rope_size, bias=bias)


FAMILY = Family(parse_config, NAMES)

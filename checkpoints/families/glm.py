"""GLM-4-9B in transformers' form (arXiv 2406.12793): Llama with biases of queries, keys and values, of whose
dimensions neighbours and only a part are turned, and joined projections."""

from dataclasses import replace

from ...model.config import GroupedQuery, LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import rope, rotary_size

NAMES = parts.BACKBONE | parts.QKV_BIASES | parts.GATE_UP


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' GlmConfig."""
    layer = LayerKind(attention(raw), parts.dense(raw))
    return parts.decoder(raw, layer, max_position=131072, norm=parts.rms(raw, 1.5625e-7))


def attention(raw: fields.Raw) -> GroupedQuery:
    size = fields.head_size(raw, 128)
    turned = rotary_size(raw, size, 0.5)
    turn = replace(rope(raw, turned, length=131072, partial=True), interleaved=True)
    bias = fields.flag(raw, "attention_bias", True)
    return parts.grouped_query(raw, turn, size, kv_heads=2, rotary_size=turned, bias=bias)


FAMILY = Family(config, NAMES, parts.IGNORED)

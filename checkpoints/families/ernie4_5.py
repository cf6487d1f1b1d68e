"""ERNIE 4.5 without experts (Baidu, technical report of 2025): Llama that turns neighbouring dimensions."""

from dataclasses import replace

from ...model.config import GroupedQuery, LayerKind, ModelConfig
from . import fields, llama, parts
from .family import Family
from .ropes import rope


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Ernie4_5Config."""
    size, bias = parts.nullable_head_size(raw, 128), fields.flag(raw, "use_bias", False)
    layer = LayerKind(attention(raw, size, 2, bias), parts.dense(raw, bias=bias))
    return parts.decoder(raw, layer, max_position=131072, norm=parts.rms(raw, 1e-5), tied=True)


def attention(raw: fields.Raw, size: int, kv_heads: int, bias: bool) -> GroupedQuery:
    turn = replace(rope(raw, size, length=131072, theta=500000.0), interleaved=True)
    return parts.grouped_query(raw, turn, size, kv_heads=kv_heads, bias=bias, output_bias=bias)


FAMILY = Family(config, llama.NAMES, parts.IGNORED)

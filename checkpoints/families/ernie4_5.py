"""ERNIE 4.5 without experts (Baidu, technical report of 2025): Llama that rotates neighbouring dimensions."""

from dataclasses import replace

from ...model.config import GroupedQuery, LayerKind, ModelConfig
from . import fields, llama, parts
from .family import Family
from .ropes import read_rope


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Ernie4_5Config."""
    size, bias = parts.nullable_head_size(raw, 128), fields.flag(raw, "use_bias", False)
    layer = LayerKind(attention_config(raw, size, 2, bias), parts.dense_ffn_config(raw, bias=bias))
    return parts.model_config(
        raw, layer, max_position=131072, norm=parts.rms_norm_config(raw, 1e-5), tied=True
    )


def attention_config(raw: fields.Raw, size: int, kv_heads: int, bias: bool) -> GroupedQuery:
    """Return attention; `kv_heads` is the default of `num_key_value_heads`."""
    rope = replace(read_rope(raw, size, length=131072, theta=500000.0), interleaved=True)
    return parts.grouped_query_config(raw, rope, size, kv_heads=kv_heads, bias=bias, output_bias=bias)


FAMILY = Family(parse_config, llama.NAMES)

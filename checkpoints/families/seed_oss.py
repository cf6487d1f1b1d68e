"""Seed-OSS (ByteDance, 2025): Llama with biases of queries, keys and values, and a stated head size."""

from ...model.config import LayerKind, ModelConfig
from . import fields, llama, parts
from .family import Family
from .ropes import read_rope


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' SeedOssConfig."""
    size = parts.nullable_head_size(raw, 128)
    attention = parts.grouped_query_config(
        raw,
        read_rope(raw, size, length=524288),
        size,
        kv_heads=8,
        bias=fields.flag(raw, "attention_bias", True),
        output_bias=fields.flag(raw, "attention_out_bias", False),
    )
    ffn = parts.dense_ffn_config(raw, bias=fields.flag(raw, "mlp_bias", False))
    return parts.model_config(
        raw, LayerKind(attention, ffn), max_position=524288, norm=parts.rms_norm_config(raw)
    )


FAMILY = Family(parse_config, llama.NAMES)

"""Seed-OSS (ByteDance, 2025): Llama with biases of queries, keys and values, and heads of their own size."""

from ...model.config import LayerKind, ModelConfig
from . import fields, llama, parts
from .family import Family
from .ropes import rope


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' SeedOssConfig."""
    size = parts.nullable_head_size(raw, 128)
    attention = parts.grouped_query(
        raw,
        rope(raw, size, length=524288),
        size,
        kv_heads=8,
        bias=fields.flag(raw, "attention_bias", True),
        output_bias=fields.flag(raw, "attention_out_bias", False),
    )
    ffn = parts.dense(raw, bias=fields.flag(raw, "mlp_bias", False))
    return parts.decoder(raw, LayerKind(attention, ffn), max_position=524288, norm=parts.rms(raw))


FAMILY = Family(config, llama.NAMES, parts.IGNORED)

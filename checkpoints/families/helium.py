"""Helium 1 (Kyutai, 2025): Llama that rotates neighbouring dimensions. The output projection has no bias."""

from dataclasses import replace

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import read_rope

NAMES = parts.LLAMA | parts.QKV_BIASES | parts.FFN_BIASES


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' HeliumConfig."""
    size = fields.head_size(raw, 128)
    rope = replace(read_rope(raw, size, length=4096, theta=100000.0), interleaved=True)
    bias = fields.flag(raw, "attention_bias", False)
    attention = parts.grouped_query_config(raw, rope, size, kv_heads=20, bias=bias)
    ffn = parts.dense_ffn_config(raw, bias=fields.flag(raw, "mlp_bias", False))
    return parts.model_config(raw, LayerKind(attention, ffn), 4096, parts.rms_norm_config(raw, 1e-8))


FAMILY = Family(parse_config, NAMES)

"""Qwen 3 (Yang et al., arXiv 2505.09388): Llama with normed queries and keys."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .qwen2 import windows
from .ropes import read_rope

NAMES = parts.LLAMA | parts.QK_NORMS | parts.BIASES


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Qwen3Config."""
    size, bias = fields.head_size(raw, 128), fields.flag(raw, "attention_bias", False)
    rope, ffn = read_rope(raw, size, length=32768), parts.dense_ffn_config(raw)
    kinds = {"kv_heads": 32, "qk_norm": parts.rms_norm_config(raw), "bias": bias, "output_bias": bias}
    layers = [
        LayerKind(parts.grouped_query_config(raw, rope, size, window=window, **kinds), ffn)
        for window in windows(raw)
    ]
    return parts.model_config(raw, layers, max_position=32768, norm=parts.rms_norm_config(raw))


FAMILY = Family(parse_config, NAMES)

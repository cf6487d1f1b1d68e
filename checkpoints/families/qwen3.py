"""Qwen 3 (Yang et al., arXiv 2505.09388): Llama with normed queries and keys."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .qwen2 import windows
from .ropes import rope

NAMES = parts.LLAMA | parts.QK_NORMS | parts.BIASES


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Qwen3Config."""
    size, bias = fields.head_size(raw, 128), fields.flag(raw, "attention_bias", False)
    turn, ffn = rope(raw, size, length=32768), parts.dense(raw)
    kinds = {"kv_heads": 32, "qk_norm": parts.rms(raw), "bias": bias, "output_bias": bias}
    layers = [
        LayerKind(parts.grouped_query(raw, turn, size, window=window, **kinds), ffn)
        for window in windows(raw)
    ]
    return parts.decoder(raw, layers, max_position=32768, norm=parts.rms(raw))


FAMILY = Family(config, NAMES, parts.IGNORED)

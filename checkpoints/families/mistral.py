"""Mistral (Jiang et al., arXiv 2310.06825): Llama with a window on every layer."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import read_rope


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' MistralConfig."""
    size, window = fields.head_size(raw), parts.uniform_window(raw, 4096)
    attention = parts.grouped_query_config(
        raw, read_rope(raw, size, length=131072), size, kv_heads=8, window=window
    )
    layer = LayerKind(attention, parts.dense_ffn_config(raw))
    return parts.model_config(raw, layer, max_position=131072, norm=parts.rms_norm_config(raw))


FAMILY = Family(parse_config, parts.LLAMA)

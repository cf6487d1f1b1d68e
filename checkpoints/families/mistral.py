"""Mistral (Jiang et al., arXiv 2310.06825): Llama with a window on every layer."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import rope


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' MistralConfig."""
    size, window = fields.head_size(raw), parts.one_window(raw, 4096)
    attention = parts.grouped_query(raw, rope(raw, size, length=131072), size, kv_heads=8, window=window)
    layer = LayerKind(attention, parts.dense(raw))
    return parts.decoder(raw, layer, max_position=131072, norm=parts.rms(raw))


FAMILY = Family(config, parts.LLAMA, parts.IGNORED)

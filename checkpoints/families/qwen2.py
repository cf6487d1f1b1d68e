"""Qwen 2 and 2.5 (Yang et al., arXiv 2407.10671 and 2412.15115): Llama with biases of queries, keys and
values."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import rope


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Qwen2Config."""
    size = fields.head_size(raw)
    turn, ffn = rope(raw, size, length=32768), parts.dense(raw)
    layers = [
        LayerKind(parts.grouped_query(raw, turn, size, kv_heads=32, window=window, bias=True), ffn)
        for window in windows(raw)
    ]
    return parts.decoder(raw, layers, max_position=32768, norm=parts.rms(raw))


def windows(raw: fields.Raw) -> list[int | None]:
    """With `use_sliding_window`, layers from `max_window_layers` on have one."""
    used = fields.flag(raw, "use_sliding_window", False)
    window = fields.nullable(fields.integer, raw, "sliding_window", 4096) if used else None
    return parts.windows(raw, parts.windowed_from(raw, window, 28), window)


FAMILY = Family(config, parts.LLAMA | parts.QKV_BIASES, parts.IGNORED)

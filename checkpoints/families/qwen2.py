"""Qwen 2 and 2.5 (Yang et al., arXiv 2407.10671 and 2412.15115): Llama with biases of queries, keys and
values."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import read_rope


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Qwen2Config."""
    size = fields.head_size(raw)
    rope, ffn = read_rope(raw, size, length=32768), parts.dense_ffn_config(raw)
    layers = [
        LayerKind(parts.grouped_query_config(raw, rope, size, kv_heads=32, window=window, bias=True), ffn)
        for window in windows(raw)
    ]
    return parts.model_config(raw, layers, max_position=32768, norm=parts.rms_norm_config(raw))


def windows(raw: fields.Raw) -> list[int | None]:
    """Return each layer's window. With `use_sliding_window`, layers from `max_window_layers` on have one."""
    used = fields.flag(raw, "use_sliding_window", False)
    window = fields.nullable(fields.integer, raw, "sliding_window", 4096) if used else None
    return parts.windows(raw, parts.sliding_tail(raw, window, 28), window)


FAMILY = Family(parse_config, parts.LLAMA | parts.QKV_BIASES)

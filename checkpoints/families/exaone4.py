"""EXAONE 4.0 (LG AI Research, arXiv 2507.11407): Qwen 3 with norms of only what a layer's parts add; where
there is a window, only the layers that have it have a rope."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import rope

NAMES = parts.OUTSIDE | parts.OUTPUT_NORMS | parts.ATTENTION | parts.QK_NORMS | parts.FFN


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Exaone4Config."""
    size, norm = fields.head_size(raw), parts.rms(raw, 1e-5)
    turn, ffn = rope(raw, size, length=2048), parts.dense(raw)
    window = fields.nullable(fields.integer, raw, "sliding_window", 4096)
    layers = [
        LayerKind(
            parts.grouped_query(
                raw, turn if window in (w, None) else None, size, kv_heads=32, window=w, qk_norm=norm
            ),
            ffn,
        )
        for w in parts.windows(raw, types(raw, window), window)
    ]
    return parts.decoder(raw, layers, max_position=2048, norm=norm, pre_norms=False, post_norms=True)


def types(raw: fields.Raw, window: int | None) -> list[str]:
    """Layer types by `sliding_window_pattern`, which may be a word like "LLLG"; all full where there is no
    window, or `layer_types` decide."""
    if window is None or raw.get("layer_types") is not None:
        return ["full_attention"] * parts.num_layers(raw)
    return parts.patterned(raw, fields.integer(raw, "sliding_window_pattern", 4))


FAMILY = Family(config, NAMES, parts.IGNORED)

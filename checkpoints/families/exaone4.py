"""EXAONE 4.0 (LG AI Research, arXiv 2507.11407): Qwen 3 with norms after attention and feed-forward layers
only. If some layers have a window, only these have a rope."""

from typing import Any

from ...model.config import GroupedQuery, LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import read_rope

NAMES = parts.OUTER_NAMES | parts.OUTPUT_NORMS | parts.ATTENTION | parts.QK_NORMS | parts.FFN


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Exaone4Config."""
    ffn, norm = parts.dense_ffn_config(raw), parts.rms_norm_config(raw, 1e-5)
    layers = [LayerKind(mixer, ffn) for mixer in mixers(raw)]
    return parts.model_config(raw, layers, max_position=2048, norm=norm, pre_norms=False, post_norms=True)


def mixers(raw: fields.Raw) -> list[GroupedQuery]:
    """Return each layer's attention."""
    size, window = fields.head_size(raw), fields.nullable(fields.integer, raw, "sliding_window", 4096)
    rope, norm = read_rope(raw, size, length=2048), parts.rms_norm_config(raw, 1e-5)
    kinds: dict[str, Any] = {"kv_heads": 32, "qk_norm": norm}
    return [
        parts.grouped_query_config(raw, rope if window in (w, None) else None, size, window=w, **kinds)
        for w in parts.windows(raw, default_types(raw, window), window)
    ]


def default_types(raw: fields.Raw, window: int | None) -> list[str]:
    """Return default layer types by `sliding_window_pattern`; all are full without a window.

    If `layer_types` are stated the result is not used: the pattern may be a word like "LLLG".
    """
    if window is None or raw.get("layer_types") is not None:
        return ["full_attention"] * parts.num_layers(raw)
    return parts.sliding_pattern(raw, fields.integer(raw, "sliding_window_pattern", 4))


FAMILY = Family(parse_config, NAMES)

"""Gemma 3's text models (arXiv 2503.19786): Gemma 2 with normed queries and keys, and two ropes."""

from ...model.config import ModelConfig
from . import fields, gemma2, parts
from .family import Family
from .ropes import read_rope_pair

LENGTH = 131072


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Gemma3TextConfig.

    Scores are not capped: transformers does not read `attn_logit_softcapping` here.
    """
    fields.allow_only(raw, "attn_logit_softcapping")
    pattern = fields.integer(raw, "sliding_window_pattern", fields.integer(raw, "_sliding_window_pattern", 6))
    window = fields.nullable(fields.integer, raw, "sliding_window", 4096)
    full_theta, local_theta = (
        fields.number(raw, "rope_theta", 1e6),
        fields.number(raw, "rope_local_base_freq", 1e4),
    )
    full_rope, local_rope = read_rope_pair(raw, fields.head_size(raw, 256), LENGTH, (full_theta, local_theta))
    layers = [
        gemma2.layer_config(
            raw,
            full_rope if w is None else local_rope,
            w,
            None,
            qk_norm=parts.rms_norm_config(raw, offset=1.0),
        )
        for w in parts.windows(raw, parts.sliding_pattern(raw, pattern), window)
    ]
    return gemma2.model_config(raw, layers, LENGTH, None)


FAMILY = Family(parse_config, gemma2.NAMES | parts.QK_NORMS)

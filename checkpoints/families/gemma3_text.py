"""Gemma 3's text models (arXiv 2503.19786): Gemma 2 with normed queries and keys, and two ropes."""

from ...model.config import ModelConfig
from . import fields, gemma2, parts
from .family import Family
from .ropes import two_ropes

LENGTH = 131072


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Gemma3TextConfig.

    Scores are not capped: transformers does not look at `attn_logit_softcapping` here.
    """
    fields.only(raw, "attn_logit_softcapping")
    pattern = fields.integer(raw, "sliding_window_pattern", fields.integer(raw, "_sliding_window_pattern", 6))
    window = fields.nullable(fields.integer, raw, "sliding_window", 4096)
    theta, near = fields.number(raw, "rope_theta", 1e6), fields.number(raw, "rope_local_base_freq", 1e4)
    whole, local = two_ropes(raw, fields.head_size(raw, 256), LENGTH, (theta, near))
    layers = [
        gemma2.layer(raw, whole if w is None else local, w, None, qk_norm=parts.rms(raw, offset=1.0))
        for w in parts.windows(raw, parts.patterned(raw, pattern), window)
    ]
    return gemma2.decoder(raw, layers, LENGTH, None)


FAMILY = Family(config, gemma2.NAMES | parts.QK_NORMS, parts.IGNORED)

"""Command R7B and Command A (Cohere et al., arXiv 2504.00698): Command R with windows, and a rope on the
layers that have one."""

from ...model.config import LayerKind, ModelConfig
from . import cohere, fields, parts
from .family import Family


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Cohere2Config."""
    fields.only(raw, "use_qk_norm", False)
    fields.only(raw, "rotary_pct", 1)
    types = parts.patterned(raw, fields.integer(raw, "sliding_window_pattern", 4))
    window = fields.nullable(fields.integer, raw, "sliding_window", 4096)
    local, ffn = cohere.turn(raw, 10000.0), parts.dense(raw)
    layers = [
        LayerKind(cohere.attention(raw, None if w is None else local, window=w), ffn)
        for w in parts.windows(raw, types, window)
    ]
    return cohere.decoder(raw, layers)


FAMILY = Family(config, cohere.NAMES, parts.IGNORED)

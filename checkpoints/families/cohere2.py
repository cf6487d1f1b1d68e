"""Command R7B and Command A (Cohere et al., arXiv 2504.00698): Command R with windows, and a rope on the
layers that have one."""

from ...model.config import LayerKind, ModelConfig
from . import cohere, fields, parts
from .family import Family


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Cohere2Config."""
    fields.allow_only(raw, "use_qk_norm", False)
    fields.allow_only(raw, "rotary_pct", 1)
    types = parts.sliding_pattern(raw, fields.integer(raw, "sliding_window_pattern", 4))
    window = fields.nullable(fields.integer, raw, "sliding_window", 4096)
    local, ffn = cohere.interleaved_rope(raw, 10000.0), parts.dense_ffn_config(raw)
    layers = [
        LayerKind(cohere.attention_config(raw, None if w is None else local, window=w), ffn)
        for w in parts.windows(raw, types, window)
    ]
    return cohere.model_config(raw, layers)


FAMILY = Family(parse_config, cohere.NAMES)

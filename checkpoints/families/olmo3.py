"""OLMo 3 (OLMo Team, 2025): OLMo 2 with a window on three layers of four; only the others' rope is
stretched."""

from ...model.config import ModelConfig
from . import fields, olmo2, parts
from .family import Family
from .ropes import two_ropes

THETA = 500000.0


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Olmo3Config, which takes `rope_theta` for layers
    without a window alone."""
    thetas = fields.number(raw, "rope_theta", THETA), THETA
    whole, local = two_ropes(raw, fields.head_size(raw), 2048, thetas)
    window = fields.nullable(fields.integer, raw, "sliding_window", 4096)
    types = parts.patterned(raw, 4)
    layers = [olmo2.layer(raw, whole if w is None else local, w) for w in parts.windows(raw, types, window)]
    return olmo2.decoder(raw, layers)


FAMILY = Family(config, olmo2.NAMES, parts.IGNORED)

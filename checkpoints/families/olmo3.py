"""OLMo 3 (OLMo Team, 2025): OLMo 2 with a window on three layers of four. Only the rope of the others is
stretched."""

from ...model.config import ModelConfig
from . import fields, olmo2, parts
from .family import Family
from .ropes import read_rope_pair

THETA = 500000.0


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Olmo3Config.

    As there, `rope_theta` is for layers without a window alone.
    """
    thetas = fields.number(raw, "rope_theta", THETA), THETA
    full_rope, local_rope = read_rope_pair(raw, fields.head_size(raw), 2048, thetas)
    window = fields.nullable(fields.integer, raw, "sliding_window", 4096)
    types = parts.sliding_pattern(raw, 4)
    layers = [
        olmo2.layer_config(raw, full_rope if w is None else local_rope, w)
        for w in parts.windows(raw, types, window)
    ]
    return olmo2.model_config(raw, layers)


FAMILY = Family(parse_config, olmo2.NAMES)

"""Text models of GLM-4.1V (arXiv 2507.01006): GLM-4, whose rope has three positions for each token. Those of
text are equal, so that its rope is a plain one."""

from ...model.config import ModelConfig
from . import fields, glm4
from .family import Family

DEFAULTS = {"partial_rotary_factor": 1.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 32768}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Glm4vTextConfig."""
    size = fields.divided_head_size(raw)
    return glm4.parse_config({**DEFAULTS, **raw, "head_dim": size, "attention_bias": True})


FAMILY = Family(parse_config, glm4.FAMILY.names)

"""Text models of GLM-4.5V and 4.6V (arXiv 2507.01006): GLM-4.5, whose rope has three positions for each
token. Those of text are equal, so that its rope is a plain one."""

from ...model.config import ModelConfig
from . import fields, glm4_moe, parts
from .family import Family

NAMES = {path: stored for path, stored in glm4_moe.NAMES.items() if path not in parts.QK_NORMS}
DEFAULTS = {"attention_bias": True, "max_position_embeddings": 65536}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers'
    Glm4vMoeTextConfig."""
    return glm4_moe.parse_config({**DEFAULTS, **raw, "use_qk_norm": False})


FAMILY = Family(parse_config, NAMES, glm4_moe.FAMILY.ignored_patterns)

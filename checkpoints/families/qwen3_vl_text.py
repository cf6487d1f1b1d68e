"""Text models of Qwen3-VL (arXiv 2511.21631): Qwen 3 without windows, whose rope has three positions for each
token. Those of text are equal, so that its rope is a plain one."""

from ...model.config import ModelConfig
from . import fields, qwen3
from .family import Family

DEFAULTS = {"rope_theta": 5e5, "max_position_embeddings": 128000}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers'
    Qwen3VLTextConfig."""
    return qwen3.parse_config({**DEFAULTS, **raw, "use_sliding_window": False, "layer_types": None})


FAMILY = Family(parse_config, qwen3.NAMES)

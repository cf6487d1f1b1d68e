"""Text models of Qwen2-VL and Qwen2.5-VL (arXiv 2409.12191 and 2502.13923): Qwen 2, whose rope has three
positions for each token. Those of text are equal, so that its rope is a plain one."""

from ...model.config import ModelConfig
from . import fields, qwen2
from .family import Family

DEFAULTS = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "max_window_layers": 80}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers'
    Qwen2VLTextConfig."""
    fields.divided_head_size(raw)
    return qwen2.parse_config({**DEFAULTS, **raw})


FAMILY = Family(parse_config, qwen2.FAMILY.names)

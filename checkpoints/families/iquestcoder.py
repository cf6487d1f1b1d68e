"""IQuest-Coder (IQuest Research, 2026): Llama by another name."""

from ...model.config import ModelConfig
from . import fields, llama
from .family import Family

DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "head_dim": 128,
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers'
    IQuestCoderConfig."""
    fields.allow_only(raw, "clip_qkv")
    fields.allow_only(raw, "use_sliding_window", False)
    return llama.parse_config({**DEFAULTS, **raw})


FAMILY = Family(parse_config, llama.NAMES)

"""VaultGemma (Google, arXiv 2510.15001): Gemma 2 without norms of what its sublayers add."""

from dataclasses import replace

from ...model.config import ModelConfig
from . import fields, gemma2, parts
from .family import Family

NAMES = parts.OUTER_NAMES | gemma2.INPUT_NORMS | parts.ATTENTION | parts.FFN | parts.BIASES


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' VaultGemmaConfig:
    Gemma 2's."""
    return replace(gemma2.parse_config(raw), post_norms=False)


FAMILY = Family(parse_config, NAMES)

"""Granite 3's mixtures of experts with a shared expert (Granite Team, IBM, 2024)."""

from ...model.config import Experts, ModelConfig
from . import fields, granite, granitemoe
from .family import Family

NAMES = granitemoe.NAMES | granitemoe.shared_ffn_names("ffn.shared")


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers'
    GraniteMoeSharedConfig."""
    return granite.model_config_with_ffn(raw, experts_config(raw))


def experts_config(raw: fields.Raw) -> Experts:
    """Return experts, with a shared one if `shared_intermediate_size` is not 0."""
    count = fields.expert_count(raw, "num_local_experts", 8)
    shared = fields.non_negative_integer(raw, "shared_intermediate_size", 0)
    return granitemoe.experts_config(raw, count, shared)


FAMILY = Family(parse_config, NAMES)

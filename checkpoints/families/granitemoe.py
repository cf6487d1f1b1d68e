"""Granite 3's mixtures of experts (Granite Team, IBM, 2024)."""

from ...model.config import Experts, ModelConfig
from . import fields, granite, parts
from .family import Family
from .storage import Stored

BLOCK = parts.LAYER + "block_sparse_moe."
NAMES = (
    parts.BACKBONE
    | parts.BIASES
    | {
        "layers.{}.ffn.router": Stored(BLOCK + "router.layer.weight", "E,D->DE"),
        "layers.{}.ffn.experts.gate": Stored(BLOCK + "input_linear.weight", "E,[F],D->EDF"),
        "layers.{}.ffn.experts.up": Stored(BLOCK + "input_linear.weight", "E,[F],D->EDF"),
        "layers.{}.ffn.experts.down": Stored(BLOCK + "output_linear.weight", "E,[D],F->EFD"),
    }
)


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' GraniteMoeConfig."""
    return granite.model_config_with_ffn(
        raw, experts_config(raw, fields.expert_count(raw, "num_local_experts", 8))
    )


def experts_config(raw: fields.Raw, count: int, shared: int = 0) -> Experts:
    """Return `count` experts, with a shared expert of `shared` inner dimensions."""
    return parts.experts_config(raw, count, 2, fields.integer(raw, "intermediate_size"), shared=shared)


FAMILY = Family(parse_config, NAMES)

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


SHARED = parts.LAYER + "shared_mlp."


def shared_ffn_names(ours: str) -> dict[str, Stored]:
    """Return the names of the feed-forward layer that every token goes through; `ours` is its path."""
    return {
        f"layers.{{}}.{ours}.gate": Stored(SHARED + "input_linear.weight", "[F],D->DF"),
        f"layers.{{}}.{ours}.up": Stored(SHARED + "input_linear.weight", "[F],D->DF"),
        f"layers.{{}}.{ours}.down": Stored(SHARED + "output_linear.weight", "D,F->FD"),
    }


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' GraniteMoeConfig."""
    return granite.model_config_with_ffn(
        raw, experts_config(raw, fields.expert_count(raw, "num_local_experts", 8))
    )


def experts_config(raw: fields.Raw, count: int, shared: int = 0) -> Experts:
    """Return `count` experts, with a shared expert of `shared` inner dimensions."""
    return parts.experts_config(raw, count, 2, fields.integer(raw, "intermediate_size"), shared=shared)


FAMILY = Family(parse_config, NAMES)

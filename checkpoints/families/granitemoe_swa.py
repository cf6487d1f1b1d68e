"""Granite's mixtures of experts with windows, sinks, and a base of the rope for each layer (Granite Team,
IBM, 2026)."""

from ...model.config import ModelConfig
from . import fields, granite_swa, granitemoe, granitemoeshared, parts
from .family import Family
from .storage import Stored

BLOCK = granitemoe.BLOCK
NAMES = (
    granitemoeshared.NAMES
    | parts.SINKS
    | {
        "layers.{}.ffn.router": Stored(BLOCK + "router.weight", "E,D->DE"),
        "layers.{}.ffn.experts.gate": Stored(BLOCK + "experts.gate_up_proj", "E,[F],D->EDF"),
        "layers.{}.ffn.experts.up": Stored(BLOCK + "experts.gate_up_proj", "E,[F],D->EDF"),
        "layers.{}.ffn.experts.down": Stored(BLOCK + "experts.down_proj", "E,[D],F->EFD"),
    }
)


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers'
    GraniteMoeSWAConfig."""
    return granite_swa.model_config_with_ffn(raw, granitemoeshared.experts_config(raw))


FAMILY = Family(parse_config, NAMES)

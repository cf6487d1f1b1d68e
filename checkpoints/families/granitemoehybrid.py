"""Granite 4 (Granite Team, IBM, 2025): Mamba-2 (arXiv 2405.21060) on most layers, attention on the others;
behind them experts and one that every token goes to, or that one alone."""

from ...model.config import Dense, Experts, LayerKind, ModelConfig
from ...model.rope import Rope
from . import fields, granite, granitemoe, mamba2, parts
from .family import Family
from .ropes import rope
from .stored import Stored

SHARED = parts.LAYER + "shared_mlp."
NAMES = (
    granitemoe.NAMES
    | mamba2.names(parts.LAYER + "mamba.")
    | {
        f"layers.{{}}.{ours}.{path}": stored
        for ours in ("ffn", "ffn.shared")
        for path, stored in {
            "gate": Stored(SHARED + "input_linear.weight", "[F],D->DF"),
            "up": Stored(SHARED + "input_linear.weight", "[F],D->DF"),
            "down": Stored(SHARED + "output_linear.weight", "D,F->FD"),
        }.items()
    }
)
MIXERS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' GraniteMoeHybridConfig."""
    fields.only(raw, "normalization_function", "rmsnorm")
    mixers, behind = (granite.attention(raw, turn(raw)), mamba2.beside_attention(raw, width(raw))), ffn(raw)
    name = fields.named(raw, "layer_types", "layers_block_type")
    kinds = fields.layer_types(raw, ["mamba"] * parts.num_layers(raw), tuple(MIXERS), name)
    return granite.decoder(raw, [LayerKind(mixers[MIXERS[kind]], behind) for kind in kinds])


def width(raw: fields.Raw) -> int:
    """Inner dimensions of Mamba-2."""
    return fields.integer(raw, "mamba_expand", 2) * fields.integer(raw, "hidden_size")


def turn(raw: fields.Raw) -> Rope | None:
    """Rope of the attention layers, if `position_embedding_type` is "rope"."""
    kinds = {"nope": False, "rope": True}
    turned = fields.chosen(raw, "position_embedding_type", "nope", kinds)
    return rope(raw, fields.head_size(raw), length=2048) if turned else None


def ffn(raw: fields.Raw) -> Dense | Experts:
    """Experts and one that every token goes to; with 0 of them that one alone."""
    count = fields.count(raw, "num_local_experts", 8)
    shared = fields.integer(raw, "shared_intermediate_size", 1024)
    if count:
        return granitemoe.experts(raw, fields.experts(raw, "num_local_experts", 8), shared)
    return Dense(shared, fields.activation(raw, "hidden_act", "silu"))


FAMILY = Family(config, NAMES, parts.IGNORED)

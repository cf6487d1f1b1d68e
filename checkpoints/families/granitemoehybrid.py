"""Granite 4 (Granite Team, IBM, 2025): Mamba-2 (arXiv 2405.21060) on most layers, attention on the others.
Feed-forward layers are experts with a shared one, or that one alone."""

from ...model.config import Dense, Experts, LayerKind, ModelConfig
from ...model.rope import Rope
from . import fields, granite, granitemoe, mamba2, parts
from .family import Family
from .ropes import read_rope

NAMES = (
    granitemoe.NAMES
    | granitemoe.shared_ffn_names("ffn")
    | granitemoe.shared_ffn_names("ffn.shared")
    | mamba2.mixer_names(parts.LAYER + "mamba.")
)
MIXERS = {"mamba": True, "linear_attention": True, "attention": False, "full_attention": False}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers'
    GraniteMoeHybridConfig."""
    fields.allow_only(raw, "normalization_function", "rmsnorm")
    mixers, layer_ffn = (
        (
            granite.attention_config(raw, attention_rope(raw)),
            mamba2.hybrid_mixer_config(raw, mamba_inner_size(raw)),
        ),
        ffn_config(raw),
    )
    name = fields.present_name(raw, "layer_types", "layers_block_type")
    kinds = fields.layer_types(raw, ["mamba"] * parts.num_layers(raw), tuple(MIXERS), name)
    return granite.model_config(raw, [LayerKind(mixers[MIXERS[kind]], layer_ffn) for kind in kinds])


def mamba_inner_size(raw: fields.Raw) -> int:
    """Return the number of inner dimensions of Mamba-2."""
    return fields.integer(raw, "mamba_expand", 2) * fields.integer(raw, "hidden_size")


def attention_rope(raw: fields.Raw) -> Rope | None:
    """Return the rope of the attention layers if `position_embedding_type` is "rope", else None."""
    kinds = {"nope": False, "rope": True}
    has_rope = fields.enum_value(raw, "position_embedding_type", "nope", kinds)
    return read_rope(raw, fields.head_size(raw), length=2048) if has_rope else None


def ffn_config(raw: fields.Raw) -> Dense | Experts:
    """Return experts with a shared expert. Without experts it is the shared one alone."""
    count = fields.non_negative_integer(raw, "num_local_experts", 8)
    shared = fields.integer(raw, "shared_intermediate_size", 1024)
    if count:
        return granitemoe.experts_config(raw, fields.expert_count(raw, "num_local_experts", 8), shared)
    return Dense(shared, fields.activation(raw, "hidden_act", "silu"))


FAMILY = Family(parse_config, NAMES)

"""Granite 3 (Granite Team, IBM, 2024): Llama with factors of the embedding, of scores, of what layers
add, and of logits."""

from ...model.config import Dense, Experts, GroupedQuery, LayerKind, ModelConfig
from ...model.rope import Rope
from . import fields, llama, parts
from .family import Family
from .ropes import read_rope


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' GraniteConfig."""
    return model_config_with_ffn(raw, parts.dense_ffn_config(raw, bias=fields.flag(raw, "mlp_bias", False)))


def model_config_with_ffn(raw: fields.Raw, ffn: Dense | Experts) -> ModelConfig:
    """Return a model whose layers have attention and this feed-forward layer."""
    mixer = attention_config(raw, read_rope(raw, fields.head_size(raw), length=2048))
    return model_config(raw, LayerKind(mixer, ffn))


def attention_config(raw: fields.Raw, rope: Rope | None) -> GroupedQuery:
    """Return attention with the factor of scores."""
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    scale = fields.number(raw, "attention_multiplier", 1.0)
    return parts.grouped_query_config(raw, rope, size, bias=bias, output_bias=bias, scale=scale)


def model_config(raw: fields.Raw, layers: list[LayerKind] | LayerKind) -> ModelConfig:
    """Return a model of these layers, with the family's factors."""
    return parts.model_config(
        raw,
        layers,
        max_position=2048,
        norm=parts.rms_norm_config(raw),
        embedding_scale=fields.number(raw, "embedding_multiplier", 1.0),
        residual_scale=fields.number(raw, "residual_multiplier", 1.0),
        logit_scale=1.0 / fields.number(raw, "logits_scaling", 1.0),
    )


FAMILY = Family(parse_config, llama.NAMES)

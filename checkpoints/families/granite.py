"""Granite 3 (Granite Team, IBM, 2024): Llama with factors of the embedding, of scores, of what layers
add, and of logits."""

from ...model.config import Dense, Experts, GroupedQuery, LayerKind, ModelConfig
from ...model.rope import Rope
from . import fields, llama, parts
from .family import Family
from .ropes import rope


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' GraniteConfig."""
    return alike(raw, parts.dense(raw, bias=fields.flag(raw, "mlp_bias", False)))


def alike(raw: fields.Raw, ffn: Dense | Experts) -> ModelConfig:
    """A model whose layers have attention and this feed-forward layer."""
    mixer = attention(raw, rope(raw, fields.head_size(raw), length=2048))
    return decoder(raw, LayerKind(mixer, ffn))


def attention(raw: fields.Raw, turn: Rope | None) -> GroupedQuery:
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    scale = fields.number(raw, "attention_multiplier", 1.0)
    return parts.grouped_query(raw, turn, size, bias=bias, output_bias=bias, scale=scale)


def decoder(raw: fields.Raw, layers: list[LayerKind] | LayerKind) -> ModelConfig:
    """A model of these layers, with the family's factors."""
    return parts.decoder(
        raw,
        layers,
        max_position=2048,
        norm=parts.rms(raw),
        embedding_scale=fields.number(raw, "embedding_multiplier", 1.0),
        residual_scale=fields.number(raw, "residual_multiplier", 1.0),
        logit_scale=1.0 / fields.number(raw, "logits_scaling", 1.0),
    )


FAMILY = Family(config, llama.NAMES, parts.IGNORED)

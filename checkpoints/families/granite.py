"""Granite 3 (Granite Team, IBM, 2024): Llama with factors of the embedding, of scores, of what layers
add, and of logits."""

from ...model.config import Dense, Experts, LayerKind, ModelConfig
from . import fields, llama, parts
from .family import Family
from .ropes import rope


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' GraniteConfig."""
    return decoder(raw, parts.dense(raw, bias=fields.flag(raw, "mlp_bias", False)))


def decoder(raw: fields.Raw, ffn: Dense | Experts) -> ModelConfig:
    """A model whose layers have this feed-forward layer."""
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    scale = fields.number(raw, "attention_multiplier", 1.0)
    turn = rope(raw, size, length=2048)
    attention = parts.grouped_query(raw, turn, size, bias=bias, output_bias=bias, scale=scale)
    return parts.decoder(
        raw,
        [LayerKind(attention, ffn)] * parts.num_layers(raw),
        max_position=2048,
        norm=parts.rms(raw),
        embedding_scale=fields.number(raw, "embedding_multiplier", 1.0),
        residual_scale=fields.number(raw, "residual_multiplier", 1.0),
        logit_scale=1.0 / fields.number(raw, "logits_scaling", 1.0),
    )


FAMILY = Family(config, llama.NAMES, parts.IGNORED)

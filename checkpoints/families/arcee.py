"""Arcee's foundation models (AFM, 2025): Llama with a squared ReLU without a gate."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import rope

NAMES = parts.BACKBONE | parts.BIASES | parts.plain("mlp.up_proj", "mlp.down_proj")


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' ArceeConfig."""
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    attention = parts.grouped_query(raw, rope(raw, size, length=4096), size, bias=bias, output_bias=bias)
    activation = fields.activation(raw, "hidden_act", "relu2")
    ffn = parts.dense(raw, activation, gated=False, bias=fields.flag(raw, "mlp_bias", False))
    return parts.decoder(raw, LayerKind(attention, ffn), max_position=4096, norm=parts.rms(raw, 1e-5))


FAMILY = Family(config, NAMES, parts.IGNORED)

"""Jais 2 (MBZUAI, Inception and Cerebras, 2025): Llama with layer norms, biases and squared ReLU without a
gate."""

from ...model.config import LayerKind, ModelConfig
from . import fields, nemotron, parts
from .family import Family
from .ropes import read_rope


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Jais2Config."""
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", True)
    rope, norm = read_rope(raw, size, length=8192), parts.layer_norm_config(raw, "layer_norm_eps")
    attention = parts.grouped_query_config(raw, rope, size, bias=bias, output_bias=bias)
    activation = fields.activation(raw, "hidden_act", "relu2")
    ffn = parts.dense_ffn_config(raw, activation, gated=False, bias=fields.flag(raw, "mlp_bias", True))
    return parts.model_config(raw, LayerKind(attention, ffn), max_position=8192, norm=norm)


FAMILY = Family(parse_config, nemotron.NAMES)

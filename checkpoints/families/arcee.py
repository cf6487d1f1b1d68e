"""Arcee's foundation models (AFM, 2025): Llama with a squared ReLU without a gate."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import read_rope

NAMES = parts.BACKBONE | parts.BIASES | parts.plain_ffn_names("mlp.up_proj", "mlp.down_proj")


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' ArceeConfig."""
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    attention = parts.grouped_query_config(
        raw, read_rope(raw, size, length=4096), size, bias=bias, output_bias=bias
    )
    activation = fields.activation(raw, "hidden_act", "relu2")
    ffn = parts.dense_ffn_config(raw, activation, gated=False, bias=fields.flag(raw, "mlp_bias", False))
    return parts.model_config(
        raw, LayerKind(attention, ffn), max_position=4096, norm=parts.rms_norm_config(raw, 1e-5)
    )


FAMILY = Family(parse_config, NAMES)

"""Nemotron-4 and Minitron (Parmar et al., arXiv 2402.16819; Muralidharan et al., arXiv 2407.14679): layer
norms whose gains are stored around 0, and squared ReLU without a gate. A part of each head is rotated."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family

NAMES = (
    parts.BACKBONE | parts.NORM_BIASES | parts.BIASES | parts.plain_ffn_names("mlp.up_proj", "mlp.down_proj")
)


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' NemotronConfig."""
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    attention = parts.partial_rotary_attention_config(
        raw, size, length=4096, share=0.5, bias=bias, output_bias=bias
    )
    activation = fields.activation(raw, "hidden_act", "relu2")
    ffn = parts.dense_ffn_config(raw, activation, gated=False, bias=fields.flag(raw, "mlp_bias", False))
    return parts.model_config(
        raw,
        LayerKind(attention, ffn),
        max_position=4096,
        norm=parts.layer_norm_config(raw, "norm_eps", offset=1.0),
    )


FAMILY = Family(parse_config, NAMES)

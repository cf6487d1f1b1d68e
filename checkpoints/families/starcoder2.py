"""StarCoder 2 (Lozhkov et al., arXiv 2402.19173): Llama with layer norms, biases and plain feed-forward
layers."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import read_rope

NAMES = parts.BACKBONE | parts.NORM_BIASES | parts.BIASES | parts.plain_ffn_names("mlp.c_fc", "mlp.c_proj")


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Starcoder2Config."""
    size, bias = fields.head_size(raw), fields.flag(raw, "use_bias", True)
    kinds = {"kv_heads": 2, "window": parts.uniform_window(raw, None), "bias": bias, "output_bias": bias}
    attention = parts.grouped_query_config(raw, read_rope(raw, size, length=4096), size, **kinds)
    activation = fields.activation(raw, "hidden_act", "gelu_pytorch_tanh")
    return parts.model_config(
        raw,
        LayerKind(attention, parts.dense_ffn_config(raw, activation, gated=False, bias=bias)),
        max_position=4096,
        norm=parts.layer_norm_config(raw, "norm_epsilon"),
        tied=True,
    )


FAMILY = Family(parse_config, NAMES)

"""StarCoder 2 (Lozhkov et al., arXiv 2402.19173): Llama with layer norms, biases and plain feed-forward
layers."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import rope

NAMES = parts.BACKBONE | parts.NORM_BIASES | parts.BIASES | parts.plain("mlp.c_fc", "mlp.c_proj")


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Starcoder2Config."""
    size, bias = fields.head_size(raw), fields.flag(raw, "use_bias", True)
    kinds = {"kv_heads": 2, "window": parts.one_window(raw, None), "bias": bias, "output_bias": bias}
    attention = parts.grouped_query(raw, rope(raw, size, length=4096), size, **kinds)
    activation = fields.activation(raw, "hidden_act", "gelu_pytorch_tanh")
    return parts.decoder(
        raw,
        LayerKind(attention, parts.dense(raw, activation, gated=False, bias=bias)),
        max_position=4096,
        norm=parts.layer_norm(raw, "norm_epsilon"),
        tied=True,
    )


FAMILY = Family(config, NAMES, parts.IGNORED)

"""Gemma 1 (arXiv 2403.08295): Llama with a stated head size, GELU, norm gains stored around 0 and scaled
embeddings."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import read_rope


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' GemmaConfig.

    As there, "gelu" is its tanh form, and `hidden_activation` is not read.
    """
    fields.allow_only(raw, "use_bidirectional_attention", False)
    size, bias = fields.head_size(raw, 256), fields.flag(raw, "attention_bias", False)
    rope = read_rope(raw, size, length=8192)
    attention = parts.grouped_query_config(raw, rope, size, kv_heads=16, bias=bias, output_bias=bias)
    activation = fields.activation(raw, "hidden_act", "gelu_pytorch_tanh")
    ffn = parts.dense_ffn_config(raw, "gelu_tanh" if raw.get("hidden_act") == "gelu" else activation)
    return parts.model_config(
        raw,
        LayerKind(attention, ffn),
        max_position=8192,
        norm=parts.rms_norm_config(raw, offset=1.0),
        tied=True,
        embedding_scale=fields.integer(raw, "hidden_size") ** 0.5,
    )


FAMILY = Family(parse_config, parts.LLAMA | parts.BIASES)

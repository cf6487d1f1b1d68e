"""Gemma 1 (arXiv 2403.08295): Llama with heads of their own size, GELU, gains around one and scaled
embeddings."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import rope


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' GemmaConfig, which takes "gelu" for its tanh form and
    does not look at `hidden_activation`."""
    fields.only(raw, "use_bidirectional_attention", False)
    size, bias = fields.head_size(raw, 256), fields.flag(raw, "attention_bias", False)
    turn = rope(raw, size, length=8192)
    attention = parts.grouped_query(raw, turn, size, kv_heads=16, bias=bias, output_bias=bias)
    activation = fields.activation(raw, "hidden_act", "gelu_pytorch_tanh")
    ffn = parts.dense(raw, "gelu_tanh" if raw.get("hidden_act") == "gelu" else activation)
    return parts.decoder(
        raw,
        LayerKind(attention, ffn),
        max_position=8192,
        norm=parts.rms(raw, offset=1.0),
        tied=True,
        embedding_scale=fields.integer(raw, "hidden_size") ** 0.5,
    )


FAMILY = Family(config, parts.LLAMA | parts.BIASES, parts.IGNORED)

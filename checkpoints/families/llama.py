"""Llama 2 and 3 (Touvron et al., arXiv 2307.09288; Grattafiori et al., arXiv 2407.21783)."""

from typing import Any

from ...model.config import Dense, GroupedQuery, LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import export_rope, read_rope

NAMES = parts.LLAMA | parts.BIASES | parts.FFN_BIASES


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' LlamaConfig."""
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    fields.allow_only(raw, "sliding_window")
    parts.uniform_window(raw, None)
    attention = parts.grouped_query_config(
        raw, read_rope(raw, size, length=2048), size, bias=bias, output_bias=bias
    )
    ffn = parts.dense_ffn_config(raw, bias=fields.flag(raw, "mlp_bias", False))
    return parts.model_config(
        raw, LayerKind(attention, ffn), max_position=2048, norm=parts.rms_norm_config(raw)
    )


def export_config(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of a `config.json` that describe a model. Inverse of `config`.

    Raises ValueError for a model that is not shaped like Llama.
    """
    attention, ffn = config.layers[0].mixer, config.layers[0].ffn
    if not isinstance(attention, GroupedQuery) or not isinstance(ffn, Dense) or attention.rope is None:
        raise ValueError(
            "only models shaped like Llama are written without `like`, a folder of their own family"
        )
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": ffn.size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_size,
        "hidden_act": {"gelu_tanh": "gelu_pytorch_tanh"}.get(ffn.activation, ffn.activation),
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm.eps,
        "rope_theta": attention.rope.theta,
        "rope_scaling": export_rope(attention.rope),
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": attention.bias,
        "mlp_bias": ffn.bias,
    }


FAMILY = Family(parse_config, NAMES)

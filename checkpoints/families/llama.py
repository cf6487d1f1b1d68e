"""Llama 2 and 3 (Touvron et al., arXiv 2307.09288; Grattafiori et al., arXiv 2407.21783), and what is shaped
like them."""

from typing import Any

from ...model.config import Dense, GroupedQuery, LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import rope, rope_scaling

NAMES = parts.LLAMA | parts.BIASES | parts.FFN_BIASES


def config(raw: fields.Raw) -> ModelConfig:
    """A `config.json` as our sizes; absent fields have the defaults of transformers' LlamaConfig."""
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    fields.only(raw, "sliding_window")
    parts.one_window(raw, None)
    attention = parts.grouped_query(raw, rope(raw, size, length=2048), size, bias=bias, output_bias=bias)
    ffn = parts.dense(raw, bias=fields.flag(raw, "mlp_bias", False))
    return parts.decoder(raw, LayerKind(attention, ffn), max_position=2048, norm=parts.rms(raw))


def export(config: ModelConfig) -> dict[str, Any]:
    """Our sizes as the fields of a `config.json`: `config` read backwards.

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
        "rope_scaling": rope_scaling(attention.rope),
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": attention.bias,
        "mlp_bias": ffn.bias,
    }


FAMILY = Family(config, NAMES, parts.IGNORED)

"""Apertus (Swiss AI, arXiv 2509.14233): Llama with norms of queries and keys, and xIELU (arXiv 2411.13010)
without a gate."""

from typing import Any

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import read_rope
from .storage import Stored

NAMES = (
    parts.OUTER_NAMES
    | parts.ATTENTION
    | parts.BIASES
    | parts.QK_NORMS
    | {
        "layers.{}.attention_norm.gain": Stored(parts.LAYER + "attention_layernorm.weight", "D->D"),
        "layers.{}.ffn_norm.gain": Stored(parts.LAYER + "feedforward_layernorm.weight", "D->D"),
        "layers.{}.ffn.up": parts.FFN["layers.{}.ffn.up"],
        "layers.{}.ffn.down": parts.FFN["layers.{}.ffn.down"],
        "layers.{}.ffn.slopes.positive": Stored(parts.LAYER + "mlp.act_fn.alpha_p", "A->A"),
        "layers.{}.ffn.slopes.negative": Stored(parts.LAYER + "mlp.act_fn.alpha_n", "A->A"),
        "layers.{}.ffn.slopes.linear": Stored(parts.LAYER + "mlp.act_fn.beta", "->A"),
        "layers.{}.ffn.slopes.limit": Stored(parts.LAYER + "mlp.act_fn.eps", "->A"),
    }
)
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12000000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' ApertusConfig."""
    fields.allow_only(raw, "mlp_bias", False)
    if not raw.get("rope_scaling") and not raw.get("rope_parameters"):
        raw = {**raw, "rope_parameters": ROPE}
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    norm, rope = parts.rms_norm_config(raw, 1e-5), read_rope(raw, size, length=65536, theta=12000000.0)
    kinds: dict[str, Any] = {"qk_norm": norm, "bias": bias, "output_bias": bias}
    attention = parts.grouped_query_config(raw, rope, size, **kinds)
    activation = fields.enum_value(raw, "hidden_act", "xielu", {**fields.ACTIVATIONS, "xielu": "xielu"})
    ffn = parts.dense_ffn_config(raw, activation, gated=False)
    return parts.model_config(raw, LayerKind(attention, ffn), max_position=65536, norm=norm)


FAMILY = Family(parse_config, NAMES)

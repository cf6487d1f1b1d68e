"""InternLM 3 (Shanghai AI Laboratory, 2025): Llama with biases under other names, and few key heads."""

from ...model.config import LayerKind, ModelConfig
from . import fields, llama, parts
from .family import Family
from .ropes import read_rope


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' InternLM3Config."""
    size = fields.head_size({"head_dim": 128, **raw})
    bias = fields.flag(raw, "qkv_bias", fields.flag(raw, "attention_bias", False))
    output_bias = fields.flag(raw, "bias", fields.flag(raw, "mlp_bias", False))
    rope = read_rope(drop_dynamic_rope(raw), size, length=32768)
    attention = parts.grouped_query_config(raw, rope, size, kv_heads=2, bias=bias, output_bias=output_bias)
    layer = LayerKind(attention, parts.dense_ffn_config(raw, bias=output_bias))
    return parts.model_config(raw, layer, max_position=32768, norm=parts.rms_norm_config(raw, 1e-5))


def drop_dynamic_rope(raw: fields.Raw) -> fields.Raw:
    """Replace a "dynamic" rope by the default one.

    It differs only beyond `max_position_embeddings`, which no sequence exceeds.
    """
    for name in ("rope_scaling", "rope_parameters"):
        stated = raw.get(name)
        if isinstance(stated, dict) and (stated.get("rope_type") or stated.get("type")) == "dynamic":
            raw = {**raw, name: {**stated, "rope_type": "default"}}
    return raw


FAMILY = Family(parse_config, llama.NAMES)

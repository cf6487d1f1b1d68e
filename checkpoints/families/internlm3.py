"""InternLM 3 (Shanghai AI Laboratory, 2025): Llama with biases under other names, and few heads of keys."""

from ...model.config import LayerKind, ModelConfig
from . import fields, llama, parts
from .family import Family
from .ropes import rope


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' InternLM3Config."""
    size = fields.head_size({"head_dim": 128, **raw})
    bias = fields.flag(raw, "qkv_bias", fields.flag(raw, "attention_bias", False))
    rest = fields.flag(raw, "bias", fields.flag(raw, "mlp_bias", False))
    turn = rope(short(raw), size, length=32768)
    attention = parts.grouped_query(raw, turn, size, kv_heads=2, bias=bias, output_bias=rest)
    layer = LayerKind(attention, parts.dense(raw, bias=rest))
    return parts.decoder(raw, layer, max_position=32768, norm=parts.rms(raw, 1e-5))


def short(raw: fields.Raw) -> fields.Raw:
    """The rope "dynamic" has other frequencies beyond `max_position_embeddings` only, where no sequence
    gets."""
    for name in ("rope_scaling", "rope_parameters"):
        found = raw.get(name)
        if isinstance(found, dict) and (found.get("rope_type") or found.get("type")) == "dynamic":
            raw = {**raw, name: {**found, "rope_type": "default"}}
    return raw


FAMILY = Family(config, llama.NAMES, parts.IGNORED)

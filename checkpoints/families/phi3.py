"""Phi-3 and Phi-4 (Abdin et al., arXiv 2404.14219 and 2412.08905): Llama with joined projections."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .storage import Stored

QKV = parts.LAYER + "self_attn.qkv_proj.weight"
NAMES = (
    parts.OUTER_NAMES
    | parts.NORMS
    | parts.OUTPUT
    | parts.GATE_UP
    | {
        "layers.{}.attention.q": Stored(QKV, "[NH],D->DNH"),
        "layers.{}.attention.k": Stored(QKV, "[KH],D->DKH"),
        "layers.{}.attention.v": Stored(QKV, "[KH],D->DKH"),
    }
)


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Phi3Config.

    The rope kinds "su" and "yarn" mean longrope here.
    """
    fields.allow_only(raw, "attention_bias", False)
    size, window = fields.head_size(raw), parts.uniform_window(raw, None)
    attention = parts.partial_rotary_attention_config(
        with_current_fields(raw), size, 4096, 1.0, window=window
    )
    layer = LayerKind(attention, parts.dense_ffn_config(raw))
    return parts.model_config(raw, layer, max_position=4096, norm=parts.rms_norm_config(raw, 1e-5))


def with_current_fields(raw: fields.Raw) -> fields.Raw:
    """Return the fields with the rope under today's names, in place of Phi-3's older ones."""
    original = fields.integer(raw, "original_max_position_embeddings", 4096)
    current = {**raw, "original_max_position_embeddings": original}
    for name in ("rope_scaling", "rope_parameters"):
        stated = current.get(name)
        if isinstance(stated, dict):
            kind = stated.get("rope_type") or stated.get("type")
            if kind is None:
                continue
            fields.allow_only({"rope_type": kind}, "rope_type", "default", "longrope", "su", "yarn")
            current[name] = {**stated, "rope_type": "default" if kind == "default" else "longrope"}
    return current


FAMILY = Family(parse_config, NAMES)

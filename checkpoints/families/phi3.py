"""Phi-3 and Phi-4 (Abdin et al., arXiv 2404.14219 and 2412.08905): Llama with joined projections."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .stored import Stored

QKV = parts.LAYER + "self_attn.qkv_proj.weight"
NAMES = (
    parts.OUTSIDE
    | parts.NORMS
    | parts.OUTPUT
    | parts.GATE_UP
    | {
        "layers.{}.attention.q": Stored(QKV, "[NH],D->DNH"),
        "layers.{}.attention.k": Stored(QKV, "[KH],D->DKH"),
        "layers.{}.attention.v": Stored(QKV, "[KH],D->DKH"),
    }
)


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Phi3Config; the kinds "su" and "yarn" mean longrope
    here."""
    fields.only(raw, "attention_bias", False)
    size, window = fields.head_size(raw), parts.one_window(raw, None)
    attention = parts.partly_turned(named(raw), size, 4096, 1.0, window=window)
    layer = LayerKind(attention, parts.dense(raw))
    return parts.decoder(raw, layer, max_position=4096, norm=parts.rms(raw, 1e-5))


def named(raw: fields.Raw) -> fields.Raw:
    """The fields of the rope under today's names, not those of Phi-3's older files."""
    original = fields.integer(raw, "original_max_position_embeddings", 4096)
    named = {**raw, "original_max_position_embeddings": original}
    for name in ("rope_scaling", "rope_parameters"):
        stated = named.get(name)
        if isinstance(stated, dict):
            kind = stated.get("rope_type") or stated.get("type")
            if kind is None:
                continue
            fields.only({"rope_type": kind}, "rope_type", "default", "longrope", "su", "yarn")
            named[name] = {**stated, "rope_type": "default" if kind == "default" else "longrope"}
    return named


FAMILY = Family(config, NAMES, parts.IGNORED)

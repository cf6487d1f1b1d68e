"""Phi-3 and Phi-4 (Abdin et al., arXiv 2404.14219 and 2412.08905): Llama with joined projections."""

from ...model.config import LayerKind, ModelConfig
from ...model.rope import Rope
from . import fields, parts
from .family import Family
from .ropes import rope
from .stored import Stored

QKV, GATE_UP = parts.LAYER + "self_attn.qkv_proj.weight", parts.LAYER + "mlp.gate_up_proj.weight"
NAMES = (
    parts.OUTSIDE
    | parts.NORMS
    | parts.OUTPUT
    | {
        "layers.{}.attention.q": Stored(QKV, "[NH],D->DNH"),
        "layers.{}.attention.k": Stored(QKV, "[KH],D->DKH"),
        "layers.{}.attention.v": Stored(QKV, "[KH],D->DKH"),
        "layers.{}.ffn.gate": Stored(GATE_UP, "[F],D->DF"),
        "layers.{}.ffn.up": Stored(GATE_UP, "[F],D->DF"),
        "layers.{}.ffn.down": Stored(parts.LAYER + "mlp.down_proj.weight", "D,F->FD"),
    }
)


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Phi3Config; the kinds "su" and "yarn" mean longrope
    here."""
    fields.only(raw, "attention_bias", False)
    size, window = fields.head_size(raw), parts.one_window(raw, None)
    turned = rotary_size(raw, size)
    attention = parts.grouped_query(
        raw, turn(raw, turned), size, window=window, rotary_size=None if turned == size else turned
    )
    layers = [LayerKind(attention, parts.dense(raw))] * parts.num_layers(raw)
    return parts.decoder(raw, layers, max_position=4096, norm=parts.rms(raw, 1e-5))


def rotary_size(raw: fields.Raw, size: int) -> int:
    """How many of a head's dimensions are turned."""
    stated = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    beside = fields.number(raw, "partial_rotary_factor", 1.0)
    share = fields.number(stated, "partial_rotary_factor", beside) if isinstance(stated, dict) else beside
    if share > 1:
        raise ValueError(f"partial_rotary_factor is {share}, expected at most 1")
    return int(size * share)


def turn(raw: fields.Raw, size: int) -> Rope:
    """The rope, under the names that Phi-3's older files have for it."""
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
    return rope(named, size, length=4096, partial=True)


FAMILY = Family(config, NAMES, parts.IGNORED)

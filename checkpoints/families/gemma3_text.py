"""Gemma 3's text models (arXiv 2503.19786): Gemma 2 with normed queries and keys, and two ropes."""

from collections.abc import Mapping

from ...model.config import ModelConfig
from ...model.rope import Rope
from ...refusals import shown
from . import fields, gemma2, parts
from .family import Family
from .ropes import require_kind, scaled

LENGTH = 131072


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Gemma3TextConfig.

    Scores are not capped: transformers does not look at `attn_logit_softcapping` here.
    """
    fields.only(raw, "attn_logit_softcapping")
    pattern = fields.integer(raw, "sliding_window_pattern", fields.integer(raw, "_sliding_window_pattern", 6))
    window = fields.nullable(fields.integer, raw, "sliding_window", 4096)
    whole, local = ropes(raw)
    layers = [
        gemma2.layer(raw, whole if w is None else local, w, None, qk_norm=parts.rms(raw, offset=1.0))
        for w in parts.windows(raw, parts.patterned(raw, pattern), window)
    ]
    return gemma2.decoder(raw, layers, LENGTH, None)


def ropes(raw: fields.Raw) -> tuple[Rope, Rope]:
    """Those of layers without and with a window; `rope_scaling` is for the former only."""
    fields.only(raw, "partial_rotary_factor", 1)
    both = fields.value(raw, "rope_parameters", {})
    if not isinstance(both, Mapping) or set(both) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"rope_parameters is {shown(both)}, expected objects for full_attention and sliding_attention"
        )
    parts_given = (*both.values(), raw.get("rope_scaling"))
    if odd := [part for part in parts_given if not isinstance(part, Mapping | None)]:
        raise ValueError(f"the rope of a layer type is {shown(odd[0])}, expected an object")
    require_kind(raw)
    whole = {**(both.get("full_attention") or {}), **fields.value(raw, "rope_scaling", {})}
    local = both.get("sliding_attention") or {}
    beside = {"max_position_embeddings": fields.integer(raw, "max_position_embeddings", LENGTH)}
    size = fields.head_size(raw, 256)
    return (
        scaled(beside, whole, "rope of full_attention", size, fields.number(raw, "rope_theta", 1e6)),
        scaled(
            beside, local, "rope of sliding_attention", size, fields.number(raw, "rope_local_base_freq", 1e4)
        ),
    )


FAMILY = Family(config, gemma2.NAMES | parts.QK_NORMS, parts.IGNORED)

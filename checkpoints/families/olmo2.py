"""OLMo 2 (OLMo Team, arXiv 2501.00656): Llama with norms of what a layer's parts give, not of what they are
given, and queries and keys normed over all heads."""

from typing import Any

from ...model.config import LayerKind, ModelConfig
from ...model.rope import Rope
from . import fields, parts
from .family import Family
from .ropes import rope

NAMES = parts.OUTSIDE | parts.OUTPUT_NORMS | parts.ATTENTION | parts.WIDE_QK_NORMS | parts.BIASES | parts.FFN


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Olmo2Config."""
    turn = rope(raw, fields.head_size(raw), length=2048)
    return decoder(raw, layer(raw, turn))


def layer(raw: fields.Raw, turn: Rope, window: int | None = None) -> LayerKind:
    """A layer of OLMo 2 or 3."""
    bias = fields.flag(raw, "attention_bias", False)
    kinds: dict[str, Any] = {"bias": bias, "output_bias": bias, "window": window}
    kinds |= {"qk_norm": parts.rms(raw, 1e-5), "qk_norm_over": "all heads"}
    return LayerKind(parts.grouped_query(raw, turn, fields.head_size(raw), **kinds), parts.dense(raw))


def decoder(raw: fields.Raw, layers: list[LayerKind] | LayerKind) -> ModelConfig:
    """A model of such layers."""
    return parts.decoder(raw, layers, 2048, parts.rms(raw, 1e-5), pre_norms=False, post_norms=True)


FAMILY = Family(config, NAMES, parts.IGNORED)

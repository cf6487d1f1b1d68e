"""OLMo 2 (OLMo Team, arXiv 2501.00656): Llama with norms after attention and feed-forward layers, not before
them. Queries and keys are normed over all heads."""

from typing import Any

from ...model.config import LayerKind, ModelConfig
from ...model.rope import Rope
from . import fields, parts
from .family import Family
from .ropes import read_rope

NAMES = (
    parts.OUTER_NAMES | parts.OUTPUT_NORMS | parts.ATTENTION | parts.WIDE_QK_NORMS | parts.BIASES | parts.FFN
)


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Olmo2Config."""
    rope = read_rope(raw, fields.head_size(raw), length=2048)
    return model_config(raw, layer_config(raw, rope))


def layer_config(raw: fields.Raw, rope: Rope, window: int | None = None) -> LayerKind:
    """Return a layer of OLMo 2 or 3."""
    bias = fields.flag(raw, "attention_bias", False)
    kinds: dict[str, Any] = {"bias": bias, "output_bias": bias, "window": window}
    kinds |= {"qk_norm": parts.rms_norm_config(raw, 1e-5), "qk_norm_over": "all heads"}
    return LayerKind(
        parts.grouped_query_config(raw, rope, fields.head_size(raw), **kinds), parts.dense_ffn_config(raw)
    )


def model_config(raw: fields.Raw, layers: list[LayerKind] | LayerKind) -> ModelConfig:
    """Return a model of OLMo's layers."""
    return parts.model_config(
        raw, layers, 2048, parts.rms_norm_config(raw, 1e-5), pre_norms=False, post_norms=True
    )


FAMILY = Family(parse_config, NAMES)

"""Youtu-LLM (Tencent Youtu Lab, arXiv 2512.24618): DeepSeek-V3's latent attention with dense feed-forward
layers."""

from ...model.config import LayerKind, ModelConfig
from . import deepseek, fields, parts
from .family import Family


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' YoutuConfig."""
    fields.allow_only(raw, "mlp_bias", False)
    attention = deepseek.latent_attention_config(raw, 131072, fields.flag(raw, "rope_interleave", True))
    layer = LayerKind(attention, parts.dense_ffn_config(raw))
    return parts.model_config(raw, layer, max_position=131072, norm=parts.rms_norm_config(raw), tied=True)


FAMILY = Family(parse_config, parts.OUTER_NAMES | parts.NORMS | parts.FFN | deepseek.LATENT)

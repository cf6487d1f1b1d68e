"""OLMoE (Muennighoff et al., arXiv 2409.02060): mixtures of experts in every layer, and queries and keys
normed over all heads."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import rope

NAMES = (
    parts.BACKBONE
    | parts.WIDE_QK_NORMS
    | parts.BIASES
    | parts.experts("mlp", "gate_proj", "up_proj", "down_proj")
)


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' OlmoeConfig."""
    fields.only(raw, "clip_qkv")
    size, bias = fields.divided_head_size(raw), fields.flag(raw, "attention_bias", False)
    norm = parts.rms(raw, 1e-5)
    kinds = {"bias": bias, "output_bias": bias, "qk_norm": norm, "qk_norm_over": "all heads"}
    attention = parts.grouped_query(raw, rope(raw, size, length=4096), size, **kinds)
    count = fields.experts(raw, fields.named(raw, "num_experts", "num_local_experts"), 64)
    inner, normalised = fields.integer(raw, "intermediate_size"), fields.flag(raw, "norm_topk_prob", False)
    experts = parts.mixture(raw, count, 8, inner, normalised=normalised)
    return parts.decoder(raw, LayerKind(attention, experts), max_position=4096, norm=norm)


FAMILY = Family(config, NAMES, parts.IGNORED)

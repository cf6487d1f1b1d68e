"""OLMoE (Muennighoff et al., arXiv 2409.02060): mixtures of experts in every layer, and queries and keys
normed over all heads."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import read_rope

NAMES = (
    parts.BACKBONE
    | parts.WIDE_QK_NORMS
    | parts.BIASES
    | parts.expert_names("mlp", "gate_proj", "up_proj", "down_proj")
)


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' OlmoeConfig."""
    fields.allow_only(raw, "clip_qkv")
    size, bias = fields.divided_head_size(raw), fields.flag(raw, "attention_bias", False)
    norm = parts.rms_norm_config(raw, 1e-5)
    kinds = {"bias": bias, "output_bias": bias, "qk_norm": norm, "qk_norm_over": "all heads"}
    attention = parts.grouped_query_config(raw, read_rope(raw, size, length=4096), size, **kinds)
    count = fields.expert_count(raw, fields.present_name(raw, "num_experts", "num_local_experts"), 64)
    inner, normalised = fields.integer(raw, "intermediate_size"), fields.flag(raw, "norm_topk_prob", False)
    experts = parts.experts_config(raw, count, 8, inner, normalised=normalised)
    return parts.model_config(raw, LayerKind(attention, experts), max_position=4096, norm=norm)


FAMILY = Family(parse_config, NAMES)

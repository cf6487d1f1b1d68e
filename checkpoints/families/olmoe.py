"""OLMoE (Muennighoff et al., arXiv 2409.02060): mixtures of experts in every layer, and queries and keys
normed over all heads."""

from ...model.config import Experts, LayerKind, ModelConfig
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
    experts = Experts(
        count=fields.experts(raw, fields.named(raw, "num_experts", "num_local_experts"), 64),
        active=fields.integer(raw, "num_experts_per_tok", 8),
        size=fields.integer(raw, "intermediate_size"),
        activation=fields.activation(raw, "hidden_act", "silu"),
        normalised=fields.flag(raw, "norm_topk_prob", False),
    )
    return parts.decoder(raw, LayerKind(attention, experts), max_position=4096, norm=norm)


FAMILY = Family(config, NAMES, parts.IGNORED)

"""GLM-4.5, 4.6 and 4.7 (arXiv 2508.06471): mixtures of experts as in DeepSeek-V3, grouped-query attention
that turns a part of each head; layers that predict several tokens ahead are left out."""

from typing import Any

from ...model.config import LayerKind, ModelConfig
from . import deepseek, fields, parts
from .family import Family

NAMES = parts.BACKBONE | parts.QKV_BIASES | parts.QK_NORMS | deepseek.MIXTURE | deepseek.CORRECTION
EXPERTS = {
    "moe_intermediate_size": 1408,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Glm4MoeConfig."""
    fields.allow_only(raw, "scoring_func", "sigmoid")
    norm, size = parts.rms_norm_config(raw, 1e-5), fields.head_size(raw)
    bias, has_qk_norm = fields.flag(raw, "attention_bias", False), fields.flag(raw, "use_qk_norm", False)
    kinds: dict[str, Any] = {"kv_heads": 8, "bias": bias, "qk_norm": norm if has_qk_norm else None}
    attention = parts.partial_rotary_attention_config(raw, size, length=131072, share=0.5, **kinds)
    ffns = deepseek.ffn_configs(raw, deepseek.corrected_experts_config(raw, EXPERTS), dense=1)
    layers = [LayerKind(attention, ffn) for ffn in ffns]
    return parts.model_config(raw, layers, max_position=131072, norm=norm)


FAMILY = Family(parse_config, NAMES, parts.MTP_LAYERS)

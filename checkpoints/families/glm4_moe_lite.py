"""GLM-4.7-Flash (Z.ai, 2026): DeepSeek-V3's latent attention with GLM-4.5's mixtures of experts. Layers that
predict several tokens ahead are left out."""

from ...model.config import LayerKind, ModelConfig
from . import deepseek, fields, parts
from .family import Family

SIZES = {
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "kv_lora_rank": 512,
    "q_lora_rank": 768,
}
EXPERTS = {
    "moe_intermediate_size": 1536,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "n_group": 1,
    "topk_group": 1,
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers'
    Glm4MoeLiteConfig."""
    fields.allow_only(raw, "scoring_func", "sigmoid")
    fields.allow_only(raw, "first_k_dense_replace", 1)
    interleaved = fields.flag(raw, "rope_interleave", True)
    attention = deepseek.latent_attention_config(raw, 202752, interleaved, SIZES)
    experts = deepseek.corrected_experts_config(raw, EXPERTS)
    ffns = parts.typed_ffn_configs(raw, experts, parts.dense_head(raw, 1))
    layers = [LayerKind(attention, ffn) for ffn in ffns]
    return parts.model_config(raw, layers, max_position=202752, norm=parts.rms_norm_config(raw, 1e-5))


FAMILY = Family(parse_config, deepseek.NAMES | deepseek.CORRECTION, parts.MTP_LAYERS)

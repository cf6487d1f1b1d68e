"""DeepSeek-V3 and R1 (arXiv 2412.19437 and 2501.12948); layers that predict several tokens ahead are left
out."""

from ...model.config import LayerKind, ModelConfig
from . import deepseek, fields, parts
from .family import Family

EXPERTS = {
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' DeepseekV3Config."""
    fields.allow_only(raw, "scoring_func", "sigmoid")
    experts = deepseek.corrected_experts_config(raw, EXPERTS)
    attention = deepseek.latent_attention_config(raw, 4096, fields.flag(raw, "rope_interleave", True))
    layers = [LayerKind(attention, ffn) for ffn in deepseek.ffn_configs(raw, experts, dense=3)]
    return parts.model_config(raw, layers, max_position=4096, norm=parts.rms_norm_config(raw))


FAMILY = Family(parse_config, deepseek.NAMES | deepseek.CORRECTION, parts.MTP_LAYERS)

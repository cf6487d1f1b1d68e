"""Sarvam 105B (Sarvam AI, 2026): DeepSeek-V3 by other names of fields."""

from ...model.config import LayerKind, ModelConfig
from . import deepseek, fields, parts
from .family import Family

SIZES = {**deepseek.SIZES, "q_lora_rank": None}
EXPERTS = {
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}
COUNT_FIELDS = (*deepseek.COUNT_FIELDS, "num_experts")
SHARED_FIELDS = ("n_shared_experts", "num_shared_experts")


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' SarvamMLAConfig."""
    fields.allow_only(raw, "scoring_func", "sigmoid")
    raw = with_current_rope(raw)
    experts = deepseek.corrected_experts_config(
        raw, EXPERTS, count_fields=COUNT_FIELDS, shared_fields=SHARED_FIELDS
    )
    interleaved = fields.flag(raw, "rope_interleave", True)
    attention = deepseek.latent_attention_config(raw, 4096, interleaved, SIZES)
    layers = [LayerKind(attention, ffn) for ffn in deepseek.ffn_configs(raw, experts, dense=1)]
    return parts.model_config(raw, layers, max_position=4096, norm=parts.rms_norm_config(raw))


def with_current_rope(raw: fields.Raw) -> fields.Raw:
    """Return the fields with the rope kind "deepseek_yarn" by today's name."""
    stated = raw.get("rope_scaling")
    if isinstance(stated, dict) and "deepseek_yarn" in (stated.get("type"), stated.get("rope_type")):
        return {**raw, "rope_scaling": {**stated, "rope_type": "yarn"}}
    return raw


FAMILY = Family(parse_config, deepseek.NAMES | deepseek.CORRECTION, parts.MTP_LAYERS)

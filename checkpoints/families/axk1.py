"""A.X K1 (SK Telecom, 2026): DeepSeek-V3 with a norm of what a mixture of experts puts out."""

from dataclasses import replace

from ...model.config import LayerKind, ModelConfig
from . import deepseek, deepseek_v3, fields, parts
from .family import Family
from .storage import Stored

NAMES = {path: stored for path, stored in deepseek.NAMES.items() if path != "layers.{}.attention.q"}
NAMES |= deepseek.CORRECTION | {
    "layers.{}.ffn.output_norm.gain": Stored(parts.LAYER + "post_mlp_layernorm.weight", "D->D")
}
EXPERTS = deepseek_v3.EXPERTS | {"n_routed_experts": 192}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' AXK1Config."""
    fields.allow_only(raw, "scoring_func", "sigmoid")
    norm, interleaved = parts.rms_norm_config(raw), fields.flag(raw, "rope_interleave", True)
    attention = deepseek.latent_attention_config(raw, 32768, interleaved)
    if attention.query_rank is None:
        raise ValueError("q_lora_rank is null, expected a positive integer")
    experts = replace(deepseek.corrected_experts_config(raw, EXPERTS), output_norm=norm)
    layers = [LayerKind(attention, ffn) for ffn in deepseek.listed_ffn_configs(raw, experts, dense=1)]
    return parts.model_config(raw, layers, max_position=32768, norm=norm)


FAMILY = Family(parse_config, NAMES, parts.MTP_LAYERS)

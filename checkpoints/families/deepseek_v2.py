"""DeepSeek-V2 and V2-Lite (arXiv 2405.04434)."""

from ...model.config import LayerKind, ModelConfig
from . import deepseek, fields, parts
from .family import Family

EXPERTS = {
    "moe_intermediate_size": 1407,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": None,
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' DeepseekV2Config.

    A true `norm_topk_prob` is refused: DeepSeek's own code obeys it, transformers does not.
    """
    for name in ("norm_topk_prob", "mlp_bias"):
        fields.allow_only(raw, name, False)
    fields.allow_only(raw, "scoring_func", "softmax")
    meanings = {"greedy": False, "group_limited_greedy": True}
    grouped = fields.enum_value(raw, "topk_method", "greedy", meanings)
    experts = deepseek.experts_config(
        raw,
        EXPERTS,
        normalised=False,
        factor=fields.number(raw, "routed_scaling_factor", 1.0),
        groups=fields.integer(raw, "n_group") if grouped else 1,
        active_groups=fields.integer(raw, "topk_group") if grouped else 1,
    )
    attention = deepseek.latent_attention_config(raw, 2048, True)
    layers = [LayerKind(attention, ffn) for ffn in deepseek.ffn_configs(raw, experts, dense=0)]
    return parts.model_config(raw, layers, max_position=2048, norm=parts.rms_norm_config(raw))


FAMILY = Family(parse_config, deepseek.NAMES)

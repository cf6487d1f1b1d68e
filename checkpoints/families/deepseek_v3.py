"""DeepSeek-V3 and R1 (arXiv 2412.19437 and 2501.12948); layers that predict several tokens ahead are left
out."""

from ...model.config import ModelConfig
from . import deepseek, fields, parts
from .family import Family
from .stored import Stored

CORRECTION = Stored(parts.LAYER + "mlp.gate.e_score_correction_bias", "E->E")
NAMES = deepseek.NAMES | {"layers.{}.ffn.correction": CORRECTION}
EXPERTS = {
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
}


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' DeepseekV3Config."""
    fields.only(raw, "scoring_func", "sigmoid")
    fields.only(raw, "topk_method", "noaux_tc")
    experts = deepseek.experts(
        raw,
        EXPERTS,
        scoring="sigmoid",
        correction=True,
        group_score="top2",
        normalised=fields.flag(raw, "norm_topk_prob", True),
        factor=fields.number(raw, "routed_scaling_factor", 2.5),
        groups=fields.integer(raw, "n_group", 8),
        active_groups=fields.integer(raw, "topk_group", 4),
    )
    attention = deepseek.latent(raw, 4096, fields.flag(raw, "rope_interleave", True))
    layers = deepseek.layers(raw, attention, experts, dense=3)
    return parts.decoder(raw, layers, max_position=4096, norm=parts.rms(raw))


FAMILY = Family(config, NAMES, (*parts.IGNORED, r"model\.layers\.(?P<beyond>\d+)\..*"))

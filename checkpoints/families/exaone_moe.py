"""K-EXAONE (LG AI Research, arXiv 2601.01739): EXAONE 4's attention between norms of its input, and
DeepSeek-V3's mixtures of experts. Layers that predict several tokens ahead are left out."""

from ...model.config import LayerKind, ModelConfig
from . import deepseek, exaone4, fields, parts
from .family import Family
from .storage import Stored

CORRECTION = {"layers.{}.ffn.correction": Stored(parts.LAYER + "mlp.e_score_correction_bias", "E->E")}
NAMES = parts.BACKBONE | parts.QK_NORMS | deepseek.MIXTURE | CORRECTION
EXPERTS = {
    "moe_intermediate_size": 1024,
    "n_shared_experts": 1,
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' ExaoneMoeConfig."""
    fields.allow_only(raw, "scoring_func", "sigmoid")
    experts = deepseek.corrected_experts_config(
        raw, EXPERTS, count_fields=("num_experts",), shared_fields=("num_shared_experts",)
    )
    first = fields.non_negative_integer(raw, "first_k_dense_replace", 1)
    ffns = parts.typed_ffn_configs(raw, experts, parts.dense_head(raw, first))
    layers = [LayerKind(mixer, ffn) for mixer, ffn in zip(exaone4.mixers(raw), ffns, strict=True)]
    return parts.model_config(raw, layers, max_position=2048, norm=parts.rms_norm_config(raw, 1e-5))


FAMILY = Family(parse_config, NAMES, (r"mtp\..*",))

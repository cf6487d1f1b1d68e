"""Solar Open (Upstage, arXiv 2601.07022): GLM-4.5 without norms of queries and keys, and a mixture of experts
in every layer."""

from ...model.config import LayerKind, ModelConfig
from . import deepseek, fields, glm4_moe, parts
from .family import Family
from .ropes import read_rope

MIXTURE = parts.expert_names("mlp", "gate_proj", "up_proj", "down_proj") | parts.gated_ffn_names(
    "ffn.shared", "mlp.shared_experts"
)
NAMES = parts.BACKBONE | parts.QKV_BIASES | MIXTURE | deepseek.CORRECTION
EXPERTS = glm4_moe.EXPERTS | {"moe_intermediate_size": 1280}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' SolarOpenConfig."""
    fields.allow_only(raw, "scoring_func", "sigmoid")
    fields.allow_only(raw, "first_k_dense_replace", 0)
    fields.allow_only(raw, "use_qk_norm", False)
    size, bias = fields.head_size(raw, 128), fields.flag(raw, "attention_bias", False)
    rope = read_rope(raw, size, length=131072, theta=1e6)
    attention = parts.grouped_query_config(raw, rope, size, kv_heads=8, bias=bias)
    layer = LayerKind(attention, deepseek.corrected_experts_config(raw, EXPERTS))
    return parts.model_config(raw, layer, max_position=131072, norm=parts.rms_norm_config(raw, 1e-5))


FAMILY = Family(parse_config, NAMES)

"""FlexOlmo (Shi et al., arXiv 2507.07024): OLMo 2 with mixtures of experts."""

from typing import Any

from ...model.config import LayerKind, ModelConfig
from . import fields, olmo2, parts
from .family import Family
from .ropes import read_rope

EXPERTS = parts.expert_names("mlp", "gate_proj", "up_proj", "down_proj")
NAMES = {path: stored for path, stored in olmo2.NAMES.items() if path not in parts.FFN} | EXPERTS


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' FlexOlmoConfig."""
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    norm, rope = parts.rms_norm_config(raw), read_rope(raw, size, length=4096, theta=500000.0)
    kinds: dict[str, Any] = {"bias": bias, "output_bias": bias, "qk_norm": norm, "qk_norm_over": "all heads"}
    attention = parts.grouped_query_config(raw, rope, size, **kinds)
    count = fields.expert_count(raw, fields.present_name(raw, "num_experts", "num_local_experts"), 7)
    inner, normalised = fields.integer(raw, "intermediate_size"), fields.flag(raw, "norm_topk_prob", False)
    layer = LayerKind(attention, parts.experts_config(raw, count, 5, inner, normalised=normalised))
    return parts.model_config(raw, layer, 4096, norm, pre_norms=False, post_norms=True)


FAMILY = Family(parse_config, NAMES)

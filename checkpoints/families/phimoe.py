"""Phi-3.5-MoE (Abdin et al., arXiv 2404.14219): Mixtral with layer norms, biases, and two experts that a
SparseMixer weighs (Liu et al., arXiv 2310.00811)."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import find_rope, read_rope
from .storage import Stored

NAMES = (
    parts.BACKBONE
    | parts.NORM_BIASES
    | parts.BIASES
    | parts.expert_names("block_sparse_moe", "w1", "w3", "w2")
    | {"head_bias": Stored("lm_head.bias", "V->V")}
)


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' PhimoeConfig."""
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    rope = read_rope(with_short_factors(raw), size, length=131072, theta=1e6)
    window = parts.uniform_window(raw, None)
    kinds = {"kv_heads": 8, "window": window, "bias": bias, "output_bias": bias}
    attention = parts.grouped_query_config(raw, rope, size, **kinds)
    count = fields.expert_count(raw, "num_local_experts", 16)
    kinds = {"scoring": "sparsemixer", "jitter": fields.number(raw, "router_jitter_noise", 0.01)}
    experts = parts.experts_config(raw, count, 2, fields.integer(raw, "intermediate_size"), **kinds)
    return parts.model_config(
        raw,
        LayerKind(attention, experts),
        max_position=131072,
        norm=parts.layer_norm_config(raw, "rms_norm_eps"),
        head_bias=fields.flag(raw, "lm_head_bias", False),
    )


def with_short_factors(raw: fields.Raw) -> fields.Raw:
    """Return the fields with a longrope as transformers computes it: cosine and sine have the factor
    `short_mscale`, and frequencies the short factors in contexts of any length."""
    name, stated = find_rope(raw)
    kind = stated.get("rope_type", stated.get("type")) if isinstance(stated, dict) else None
    if kind in (None, "default"):
        return raw
    fields.allow_only({"rope_type": kind}, "rope_type", "longrope")
    scale = fields.number(stated, "short_mscale")
    fields.allow_only({"long_mscale": fields.number(stated, "long_mscale")}, "long_mscale", scale)
    kept = {key: value for key, value in stated.items() if not key.endswith("_mscale")}
    return {**raw, name: {**kept, "long_factor": stated.get("short_factor"), "attention_factor": scale}}


FAMILY = Family(parse_config, NAMES)

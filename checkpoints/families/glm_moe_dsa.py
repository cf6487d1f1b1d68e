"""GLM-5 (Z.ai, arXiv 2602.15763): DeepSeek-V3.2 with an indexer that rotates neighbouring dimensions. Layers
that predict several tokens ahead are left out."""

from ...model.config import LayerKind, ModelConfig
from ...refusals import quote
from . import deepseek, deepseek_v32, fields, parts
from .family import Family

SIZES = {
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "kv_lora_rank": 512,
    "q_lora_rank": 2048,
}
EXPERTS = {
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}
COUNT_FIELDS = ("num_experts", *deepseek.COUNT_FIELDS)


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers'
    GlmMoeDsaConfig."""
    fields.allow_only(raw, "scoring_func", "sigmoid")
    fields.allow_only(raw, "rope_interleave", True)
    fields.layer_types(raw, ["indexed_attention"] * parts.num_layers(raw), ("indexed_attention",))
    require_own_indexers(raw)
    attention = deepseek.latent_attention_config(raw, 202752, interleaved=True, sizes=SIZES)
    attention = deepseek_v32.indexed_attention_config(raw, attention, heads=32, interleaved=True)
    experts = deepseek.corrected_experts_config(raw, EXPERTS, count_fields=COUNT_FIELDS)
    first = fields.non_negative_integer(raw, "first_k_dense_replace", 3)
    ffns = parts.typed_ffn_configs(raw, experts, parts.dense_head(raw, first))
    layers = [LayerKind(attention, ffn) for ffn in ffns]
    return parts.model_config(raw, layers, max_position=202752, norm=parts.rms_norm_config(raw, 1e-5))


def require_own_indexers(raw: fields.Raw) -> None:
    """Raise ValueError for layers that take over the keys that an earlier layer's indexer selected."""
    fields.layer_types(raw, ["full"] * parts.num_layers(raw), ("full",), "indexer_types")
    fields.allow_only(raw, "index_topk_freq", 1)
    pattern = fields.value(raw, "index_topk_pattern", [])
    if not isinstance(pattern, str | list) or any(kind not in ("F", "full") for kind in pattern):
        raise ValueError(
            f"index_topk_pattern is {quote(pattern)}, which is not supported: expected 'F' for each layer"
        )


FAMILY = Family(parse_config, deepseek_v32.NAMES | deepseek.CORRECTION, parts.MTP_LAYERS)

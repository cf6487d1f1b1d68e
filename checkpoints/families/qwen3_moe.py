"""Qwen 3 with mixtures of experts (Yang et al., arXiv 2505.09388)."""

from ...model.config import Dense, Experts, LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import read_rope

NAMES = (
    parts.LLAMA
    | parts.QK_NORMS
    | parts.BIASES
    | parts.expert_names("mlp", "gate_proj", "up_proj", "down_proj")
)


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Qwen3MoeConfig."""
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    used = fields.flag(raw, "use_sliding_window", False)
    window = parts.uniform_window(raw if used else {**raw, "sliding_window": None}, 4096)
    kinds = {
        "kv_heads": 4,
        "qk_norm": parts.rms_norm_config(raw),
        "bias": bias,
        "output_bias": bias,
        "window": window,
    }
    attention = parts.grouped_query_config(raw, read_rope(raw, size, length=32768), size, **kinds)
    layers = [LayerKind(attention, ffn) for ffn in ffn_configs(raw)]
    return parts.model_config(raw, layers, max_position=32768, norm=parts.rms_norm_config(raw))


def ffn_configs(raw: fields.Raw) -> list[Dense | Experts]:
    """Return each layer's feed-forward layer.

    Every `decoder_sparse_step`-th layer is a mixture of experts, unless `mlp_only_layers` lists it.
    """
    step, dense_layers = (
        fields.integer(raw, "decoder_sparse_step", 1),
        fields.layer_indices(raw, "mlp_only_layers", ()),
    )
    count = fields.expert_count(raw, "num_experts", fields.expert_count(raw, "num_local_experts", 128))
    size = fields.integer(raw, "moe_intermediate_size", 768)
    normalised = fields.flag(raw, "norm_topk_prob", False)
    experts = parts.experts_config(raw, count, 8, size, normalised=normalised)
    mixed = [i not in dense_layers and (i + 1) % step == 0 for i in range(parts.num_layers(raw))]
    return [experts if is_mixture else parts.dense_ffn_config(raw) for is_mixture in mixed]


FAMILY = Family(parse_config, NAMES)

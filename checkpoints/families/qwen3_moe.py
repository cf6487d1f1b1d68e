"""Qwen 3 with mixtures of experts (Yang et al., arXiv 2505.09388)."""

from ...model.config import Dense, Experts, LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import rope

NAMES = (
    parts.LLAMA | parts.QK_NORMS | parts.BIASES | parts.experts("mlp", "gate_proj", "up_proj", "down_proj")
)


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Qwen3MoeConfig."""
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    used = fields.flag(raw, "use_sliding_window", False)
    window = parts.one_window(raw if used else {**raw, "sliding_window": None}, 4096)
    kinds = {"kv_heads": 4, "qk_norm": parts.rms(raw), "bias": bias, "output_bias": bias, "window": window}
    attention = parts.grouped_query(raw, rope(raw, size, length=32768), size, **kinds)
    layers = [LayerKind(attention, ffn) for ffn in ffns(raw)]
    return parts.decoder(raw, layers, max_position=32768, norm=parts.rms(raw))


def ffns(raw: fields.Raw) -> list[Dense | Experts]:
    """Every `decoder_sparse_step`-th layer is a mixture of experts, but for those of `mlp_only_layers`."""
    step, plain = fields.integer(raw, "decoder_sparse_step", 1), fields.indices(raw, "mlp_only_layers", ())
    count = fields.experts(raw, "num_experts", fields.experts(raw, "num_local_experts", 128))
    size = fields.integer(raw, "moe_intermediate_size", 768)
    normalised = fields.flag(raw, "norm_topk_prob", False)
    experts = parts.mixture(raw, count, 8, size, normalised=normalised)
    mixed = [i not in plain and (i + 1) % step == 0 for i in range(parts.num_layers(raw))]
    return [experts if here else parts.dense(raw) for here in mixed]


FAMILY = Family(config, NAMES, parts.IGNORED)

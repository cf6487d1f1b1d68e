"""dots.llm1 (arXiv 2506.05767): Qwen 3's attention with DeepSeek-V3's mixtures of experts."""

from ...model.config import LayerKind, ModelConfig
from . import deepseek, fields, parts
from .family import Family
from .ropes import rope

NAMES = parts.BACKBONE | parts.BIASES | parts.QK_NORMS | deepseek.MIXTURE | deepseek.CORRECTION
EXPERTS = {
    "moe_intermediate_size": 1408,
    "n_shared_experts": None,
    "n_routed_experts": None,
    "num_experts_per_tok": None,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Dots1Config; `scoring_func` "noaux_tc" is a sigmoid
    too."""
    fields.only(raw, "scoring_func", "sigmoid", "noaux_tc")
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    turn, norm = rope(raw, size, length=2048), parts.rms(raw)
    kinds = {"kv_heads": 32, "qk_norm": norm, "bias": bias, "output_bias": bias}
    ffns = deepseek.ffns(raw, deepseek.corrected_experts(raw, EXPERTS), dense=0)
    layers = [
        LayerKind(parts.grouped_query(raw, turn, size, window=window, **kinds), ffn)
        for window, ffn in zip(windows(raw), ffns, strict=True)
    ]
    return parts.decoder(raw, layers, max_position=2048, norm=norm)


def windows(raw: fields.Raw) -> list[int | None]:
    """Layers from `max_window_layers` on have one, unless `sliding_window` is null."""
    window = fields.nullable(fields.integer, raw, "sliding_window", 4096)
    return parts.windows(raw, parts.windowed_from(raw, window, 62), window)


FAMILY = Family(config, NAMES, parts.IGNORED)

"""dots.llm1 (arXiv 2506.05767): Qwen 3's attention with DeepSeek-V3's mixtures of experts."""

from ...model.config import LayerKind, ModelConfig
from . import deepseek, fields, parts
from .family import Family
from .ropes import read_rope

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


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Dots1Config.

    The `scoring_func` "noaux_tc" is a sigmoid too.
    """
    fields.allow_only(raw, "scoring_func", "sigmoid", "noaux_tc")
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    rope, norm = read_rope(raw, size, length=2048), parts.rms_norm_config(raw)
    kinds = {"kv_heads": 32, "qk_norm": norm, "bias": bias, "output_bias": bias}
    ffns = deepseek.ffn_configs(raw, deepseek.corrected_experts_config(raw, EXPERTS), dense=0)
    layers = [
        LayerKind(parts.grouped_query_config(raw, rope, size, window=window, **kinds), ffn)
        for window, ffn in zip(windows(raw), ffns, strict=True)
    ]
    return parts.model_config(raw, layers, max_position=2048, norm=norm)


def windows(raw: fields.Raw) -> list[int | None]:
    """Return each layer's window: layers from `max_window_layers` on have one, unless `sliding_window` is
    null."""
    window = fields.nullable(fields.integer, raw, "sliding_window", 4096)
    return parts.windows(raw, parts.sliding_tail(raw, window, 62), window)


FAMILY = Family(parse_config, NAMES)

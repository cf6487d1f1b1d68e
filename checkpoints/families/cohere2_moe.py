"""Command A with mixtures of experts (Cohere, 2026): Command A whose layers may begin with dense ones, and
whose shared expert is added to the others or averaged with them."""

from ...model.config import Dense, Experts, GroupedQuery, LayerKind, ModelConfig
from . import cohere, deepseek, fields, parts
from .family import Family

NAMES = cohere.NAMES | deepseek.MIXTURE
SCORES = {"softmax": "softmax", "sigmoid": "sigmoid"}
SCALES = {"average": 0.5, "sum": 1.0}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers'
    Cohere2MoeConfig."""
    first = fields.non_negative_integer(raw, "first_k_dense_replace", 0)
    ffns = ffn_configs(raw, first)
    layers = [LayerKind(mixer, ffn) for mixer, ffn in zip(mixers(raw, first, ffns), ffns, strict=True)]
    norm = None if raw.get("rms_norm_eps") is None else parts.rms_norm_config(raw)
    return cohere.model_config(raw, layers, norm)


def mixers(raw: fields.Raw, first: int, ffns: list[Dense | Experts]) -> list[GroupedQuery]:
    """Return each layer's attention. Layers with a window have a rope, and so have all dense layers unless
    `prefix_dense_sliding_window_pattern` gives some a window."""
    size, prefix = fields.head_size(raw, 128), fields.integer(raw, "prefix_dense_sliding_window_pattern", 1)
    step, count = fields.integer(raw, "sliding_window_pattern", 4), parts.num_layers(raw)
    steps = [(i + 1) % prefix for i in range(first)] + [(i + 1) % step for i in range(count - first)]
    types = ["sliding_attention" if s else "full_attention" for s in steps[:count]]
    window = fields.nullable(fields.integer, raw, "sliding_window", 4096)
    sized = {**raw, "head_dim": size}
    rope = cohere.interleaved_rope(sized, 10000.0)
    return [
        cohere.attention_config(
            sized, rope if w or (isinstance(ffn, Dense) and prefix == 1) else None, window=w
        )
        for w, ffn in zip(parts.windows(raw, types, window), ffns, strict=True)
    ]


def ffn_configs(raw: fields.Raw, first: int) -> list[Dense | Experts]:
    """Return each layer's feed-forward layer: the `first` are dense by default."""
    size = fields.integer(raw, "intermediate_size")
    scale = fields.enum_value(raw, "shared_expert_combination_strategy", "average", SCALES)
    shared = size * fields.non_negative_integer(raw, "num_shared_experts", 0)
    scoring = fields.enum_value(raw, "expert_selection_fn", "softmax", SCORES)
    experts = parts.experts_config(
        raw,
        fields.expert_count(raw, "num_experts", 8),
        2,
        size,
        scoring=scoring,
        normalised=scoring == "softmax" or fields.flag(raw, "norm_topk_prob", True),
        factor=scale if shared else 1.0,
        shared=shared,
        shared_scale=scale,
    )
    dense = {**raw, "intermediate_size": fields.integer(raw, "prefix_dense_intermediate_size", size)}
    return parts.typed_ffn_configs(dense, experts, parts.dense_head(raw, first))


FAMILY = Family(parse_config, NAMES)

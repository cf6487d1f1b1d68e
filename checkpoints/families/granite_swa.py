"""Granite with a window on three layers of four, sinks, and a base of the rope for each layer (Granite Team,
IBM, 2026)."""

from dataclasses import replace

from ...model.config import Dense, Experts, LayerKind, ModelConfig
from ...model.rope import Rope
from ...refusals import quote
from . import fields, granite, llama, parts
from .family import Family
from .ropes import find_rope, read_rope

DEFAULTS = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' GraniteSWAConfig."""
    ffn = parts.dense_ffn_config(raw, bias=fields.flag(raw, "mlp_bias", False))
    return model_config_with_ffn({**DEFAULTS, **raw}, ffn)


def model_config_with_ffn(raw: fields.Raw, ffn: Dense | Experts) -> ModelConfig:
    """Return a model whose layers have attention with sinks and this feed-forward layer."""
    window = fields.nullable(fields.integer, raw, "sliding_window", 128)
    windows = parts.windows(raw, parts.full_pattern(raw), window)
    layers = [
        LayerKind(replace(granite.attention_config(raw, rope), sinks=True, window=w), ffn)
        for rope, w in zip(layer_ropes(raw), windows, strict=True)
    ]
    return granite.model_config(raw, layers)


def layer_ropes(raw: fields.Raw) -> list[Rope | None]:
    """Return each layer's rope; its base in `layer_rope_theta` is null or 0 for a layer without one."""
    size, count = fields.head_size(raw), parts.num_layers(raw)
    rope, (name, stated) = read_rope(raw, size, length=8192), find_rope(raw)
    thetas = fields.value(raw, "layer_rope_theta", [rope.theta] * count)
    if not isinstance(thetas, list) or len(thetas) != count:
        raise ValueError(f"layer_rope_theta is {quote(thetas)}, expected a list of {count}")
    named = [fields.number({"layer_rope_theta": t or None}, "layer_rope_theta", None) for t in thetas]
    return [
        None if t is None else read_rope({**raw, name: {**stated, "rope_theta": t}}, size, length=8192)
        for t in named
    ]


FAMILY = Family(parse_config, llama.NAMES | parts.SINKS)

"""Code World Model (Meta FAIR, arXiv 2510.02387): Llama 3 with a window on three layers of four."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import read_rope

ROPE = {
    "rope_type": "llama3",
    "rope_theta": 1e6,
    "factor": 16.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' CwmConfig."""
    if not raw.get("rope_scaling") and not raw.get("rope_parameters"):
        raw = {**raw, "rope_parameters": ROPE}
    size, window = fields.head_size(raw, 128), fields.nullable(fields.integer, raw, "sliding_window", 8192)
    rope = read_rope(raw, size, length=131072, theta=1e6)
    ffn = parts.dense_ffn_config(raw, bias=fields.flag(raw, "mlp_bias", False))
    layers = [
        LayerKind(parts.grouped_query_config(raw, rope, size, kv_heads=8, window=w), ffn)
        for w in parts.windows(raw, parts.full_pattern(raw), window)
    ]
    return parts.model_config(raw, layers, max_position=131072, norm=parts.rms_norm_config(raw, 1e-5))


FAMILY = Family(parse_config, parts.LLAMA | parts.FFN_BIASES)

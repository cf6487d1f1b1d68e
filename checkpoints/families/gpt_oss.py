"""gpt-oss (arXiv 2508.10925): experts with biases and a clamped activation, attention with sinks."""

from ...model.config import Experts, LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import read_rope
from .storage import Stored

MLP = parts.LAYER + "mlp."
GATE_UP = MLP + "experts.gate_up_proj"
NAMES = (
    parts.BACKBONE
    | parts.BIASES
    | parts.SINKS
    | {
        "layers.{}.ffn.router": Stored(MLP + "router.weight", "E,D->DE"),
        "layers.{}.ffn.router_bias": Stored(MLP + "router.bias", "E->E"),
        "layers.{}.ffn.experts.gate": Stored(GATE_UP, "E,D,<F>->EDF"),
        "layers.{}.ffn.experts.up": Stored(GATE_UP, "E,D,<F>->EDF"),
        "layers.{}.ffn.experts.gate_bias": Stored(GATE_UP + "_bias", "E,<F>->EF"),
        "layers.{}.ffn.experts.up_bias": Stored(GATE_UP + "_bias", "E,<F>->EF"),
        "layers.{}.ffn.experts.down": Stored(MLP + "experts.down_proj", "E,F,D->EFD"),
        "layers.{}.ffn.experts.down_bias": Stored(MLP + "experts.down_proj_bias", "E,D->ED"),
    }
)
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' GptOssConfig."""
    fields.allow_only(raw, "hidden_act", "silu")
    fields.allow_only(raw, "swiglu_alpha", 1.702)
    if not raw.get("rope_scaling") and not raw.get("rope_parameters"):
        raw = {**raw, "rope_parameters": ROPE}
    size, bias = fields.head_size(raw, 64), fields.flag(raw, "attention_bias", True)
    rope = read_rope(raw, size, length=131072, theta=150000.0)
    kinds = {"kv_heads": 8, "sinks": True, "bias": bias, "output_bias": bias}
    window = fields.nullable(fields.integer, raw, "sliding_window", 128)
    layers = [
        LayerKind(parts.grouped_query_config(raw, rope, size, window=w, **kinds), experts_config(raw))
        for w in parts.windows(raw, parts.sliding_pattern(raw, 2), window)
    ]
    return parts.model_config(raw, layers, max_position=131072, norm=parts.rms_norm_config(raw, 1e-5))


def experts_config(raw: fields.Raw) -> Experts:
    """Return experts with biases and a clamped activation."""
    return Experts(
        count=fields.expert_count(raw, "num_local_experts", fields.expert_count(raw, "num_experts", 128)),
        active=fields.integer(raw, "num_experts_per_tok", fields.integer(raw, "experts_per_token", 4)),
        size=fields.integer(raw, "intermediate_size"),
        activation="clamped_silu",
        bias=True,
        router_bias=True,
        clamp=fields.number(raw, "swiglu_limit", 7.0),
    )


FAMILY = Family(parse_config, NAMES)

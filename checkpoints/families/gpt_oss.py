"""gpt-oss (arXiv 2508.10925): experts with biases and a clamped activation, attention that may look at
nothing."""

from ...model.config import Experts, LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import rope
from .stored import Stored

MLP = parts.LAYER + "mlp."
GATE_UP = MLP + "experts.gate_up_proj"
NAMES = (
    parts.BACKBONE
    | parts.BIASES
    | {
        "layers.{}.attention.sinks": Stored(parts.LAYER + "self_attn.sinks", "N->N"),
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


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' GptOssConfig."""
    fields.only(raw, "hidden_act", "silu")
    fields.only(raw, "swiglu_alpha", 1.702)
    if not raw.get("rope_scaling") and not raw.get("rope_parameters"):
        raw = {**raw, "rope_parameters": ROPE}
    size, bias = fields.head_size(raw, 64), fields.flag(raw, "attention_bias", True)
    turn = rope(raw, size, length=131072, theta=150000.0)
    kinds = {"kv_heads": 8, "sinks": True, "bias": bias, "output_bias": bias}
    window = fields.nullable(fields.integer, raw, "sliding_window", 128)
    layers = [
        LayerKind(parts.grouped_query(raw, turn, size, window=w, **kinds), experts(raw))
        for w in parts.windows(raw, parts.patterned(raw, 2), window)
    ]
    return parts.decoder(raw, layers, max_position=131072, norm=parts.rms(raw, 1e-5))


def experts(raw: fields.Raw) -> Experts:
    return Experts(
        count=fields.experts(raw, "num_local_experts", fields.experts(raw, "num_experts", 128)),
        active=fields.integer(raw, "num_experts_per_tok", fields.integer(raw, "experts_per_token", 4)),
        size=fields.integer(raw, "intermediate_size"),
        activation="clamped_silu",
        bias=True,
        router_bias=True,
        clamp=fields.number(raw, "swiglu_limit", 7.0),
    )


FAMILY = Family(config, NAMES, parts.IGNORED)

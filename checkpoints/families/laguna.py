"""Laguna (Poolside, 2026): attention whose output has gates of softplus, heads and a rope for each kind of
layer, and mixtures of experts that are chosen by a sigmoid and a correction."""

from typing import Any

from ...model.config import Dense, Experts, GroupedQuery, LayerKind, ModelConfig
from . import fields, parts, ropes
from .family import Family
from .storage import Stored

MIXTURE = (
    parts.expert_names("mlp", "gate_proj", "up_proj", "down_proj")
    | parts.gated_ffn_names("ffn.shared", "mlp.shared_expert")
    | {"layers.{}.ffn.correction": Stored(parts.LAYER + "mlp.experts.e_score_correction_bias", "E->E")}
)
GATE = parts.LAYER + "self_attn.g_proj.weight"
NAMES = (
    parts.LLAMA
    | parts.QK_NORMS
    | MIXTURE
    | {
        "layers.{}.attention.gate": Stored(GATE, "NH,D->DNH"),
        "layers.{}.attention.head_gate": Stored(GATE, "N,D->DN"),
    }
)
ROPES = {
    "full_attention": {"rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_theta": 10000.0},
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' LagunaConfig."""
    fields.allow_only(raw, "attention_bias", False)
    fields.allow_only(raw, "moe_apply_router_weight_on_input", False)
    layers = [LayerKind(mixer, ffn) for mixer, ffn in zip(mixers(raw), ffn_configs(raw), strict=True)]
    return parts.model_config(raw, layers, max_position=131072, norm=parts.rms_norm_config(raw))


def mixers(raw: fields.Raw) -> list[GroupedQuery]:
    """Return each layer's attention: all are full by default, and `num_attention_heads` is for all layers
    without `num_attention_heads_per_layer`."""
    count, size, norm = parts.num_layers(raw), fields.head_size(raw, 128), parts.rms_norm_config(raw)
    typed_ropes, window = (
        ropes.read_ropes_by_type(raw, size, 131072, ROPES),
        fields.integer(raw, "sliding_window", 512),
    )
    kinds: dict[str, Any] = {"kv_heads": 8, "qk_norm": norm, "gated": True, "gate_activation": "softplus"}
    kinds["gate_per_head"] = has_gates_of_heads(raw)

    def attention_config(w: int | None, heads: int) -> GroupedQuery:
        rope, rotated = typed_ropes["sliding_attention" if w else "full_attention"]
        stated = {**raw, "num_attention_heads": heads}
        return parts.grouped_query_config(stated, rope, size, rotary_size=rotated, window=w, **kinds)

    heads = fields.integers_by_layer(
        raw, "num_attention_heads_per_layer", count, fields.integer(raw, "num_attention_heads")
    )
    windows = parts.windows(raw, ["full_attention"] * count, window)
    return [attention_config(w, n) for w, n in zip(windows, heads, strict=True)]


def has_gates_of_heads(raw: fields.Raw) -> bool:
    """Return True if a head has one gate, False if each of its dimensions has one, by `gating`."""
    fields.allow_only(raw, "gating", True, "per-head", "per-element")
    return fields.value(raw, "gating", True) != "per-element"


def ffn_configs(raw: fields.Raw) -> list[Dense | Experts]:
    """Return each layer's feed-forward layer: all but the first are mixtures by default."""
    experts = parts.experts_config(
        raw,
        fields.expert_count(raw, "num_experts", 256),
        8,
        fields.integer(raw, "moe_intermediate_size", 512),
        scoring="sigmoid",
        correction=True,
        factor=fields.number(raw, "moe_routed_scaling_factor", 1.0),
        shared=fields.integer(raw, "shared_expert_intermediate_size", 512),
        router_softcap=router_softcap(raw),
    )
    return parts.typed_ffn_configs(raw, experts, parts.dense_head(raw, 1))


def router_softcap(raw: fields.Raw) -> float | None:
    """Return the cap of the router's logits, or None if it is 0."""
    cap = fields.value(raw, "moe_router_logit_softcapping", 0.0)
    return None if cap == 0 else fields.number(raw, "moe_router_logit_softcapping")


FAMILY = Family(parse_config, NAMES)

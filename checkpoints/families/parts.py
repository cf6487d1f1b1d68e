"""Shared parts of Llama-like families: names of tensors, and pieces of the configuration."""

from typing import Any

from ...model.config import Activation, Dense, Experts, GroupedQuery, LayerKind, ModelConfig, NormKind
from ...model.rope import Rope
from . import fields, ropes
from .storage import Stored

LAYER = "model.layers.{}."
OUTER_NAMES = {
    "embed": Stored("model.embed_tokens.weight", "V,D->VD"),
    "norm.gain": Stored("model.norm.weight", "D->D"),
    "head": Stored("lm_head.weight", "V,D->VD"),
}
NORMS = {
    "layers.{}.attention_norm.gain": Stored(LAYER + "input_layernorm.weight", "D->D"),
    "layers.{}.ffn_norm.gain": Stored(LAYER + "post_attention_layernorm.weight", "D->D"),
}
NORM_BIASES = {
    "layers.{}.attention_norm.bias": Stored(LAYER + "input_layernorm.bias", "D->D"),
    "layers.{}.ffn_norm.bias": Stored(LAYER + "post_attention_layernorm.bias", "D->D"),
    "norm.bias": Stored("model.norm.bias", "D->D"),
}
OUTPUT = {"layers.{}.attention.o": Stored(LAYER + "self_attn.o_proj.weight", "D,NH->NHD")}
ATTENTION = OUTPUT | {
    "layers.{}.attention.q": Stored(LAYER + "self_attn.q_proj.weight", "NH,D->DNH"),
    "layers.{}.attention.k": Stored(LAYER + "self_attn.k_proj.weight", "KH,D->DKH"),
    "layers.{}.attention.v": Stored(LAYER + "self_attn.v_proj.weight", "KH,D->DKH"),
}
QKV_BIASES = {
    "layers.{}.attention.q_bias": Stored(LAYER + "self_attn.q_proj.bias", "NH->NH"),
    "layers.{}.attention.k_bias": Stored(LAYER + "self_attn.k_proj.bias", "KH->KH"),
    "layers.{}.attention.v_bias": Stored(LAYER + "self_attn.v_proj.bias", "KH->KH"),
}
OUTPUT_BIAS = {"layers.{}.attention.o_bias": Stored(LAYER + "self_attn.o_proj.bias", "D->D")}
OUTPUT_NORMS = {
    "layers.{}.attention_post_norm.gain": Stored(LAYER + "post_attention_layernorm.weight", "D->D"),
    "layers.{}.ffn_post_norm.gain": Stored(LAYER + "post_feedforward_layernorm.weight", "D->D"),
}
QK_NORMS = {
    "layers.{}.attention.q_norm": Stored(LAYER + "self_attn.q_norm.weight", "H->H"),
    "layers.{}.attention.k_norm": Stored(LAYER + "self_attn.k_norm.weight", "H->H"),
}
# a gain for each head
WIDE_QK_NORMS = {
    "layers.{}.attention.q_norm": Stored(LAYER + "self_attn.q_norm.weight", "NH->NH"),
    "layers.{}.attention.k_norm": Stored(LAYER + "self_attn.k_norm.weight", "KH->KH"),
}
SINKS = {"layers.{}.attention.sinks": Stored(LAYER + "self_attn.sinks", "N->N")}
FFN_BIASES = {
    "layers.{}.ffn.gate_bias": Stored(LAYER + "mlp.gate_proj.bias", "F->F"),
    "layers.{}.ffn.up_bias": Stored(LAYER + "mlp.up_proj.bias", "F->F"),
    "layers.{}.ffn.down_bias": Stored(LAYER + "mlp.down_proj.bias", "D->D"),
}
GATE_UP = {
    "layers.{}.ffn.gate": Stored(LAYER + "mlp.gate_up_proj.weight", "[F],D->DF"),
    "layers.{}.ffn.up": Stored(LAYER + "mlp.gate_up_proj.weight", "[F],D->DF"),
    "layers.{}.ffn.down": Stored(LAYER + "mlp.down_proj.weight", "D,F->FD"),
}
# MTP: layers after the last that predict several tokens
MTP_LAYERS = (r"model\.layers\.(?P<beyond>\d+)\..*",)


def gated_ffn_names(ours: str, theirs: str) -> dict[str, Stored]:
    """Return the names of a gated feed-forward layer's projections."""
    return {
        f"layers.{{}}.{ours}.gate": Stored(f"{LAYER}{theirs}.gate_proj.weight", "F,D->DF"),
        f"layers.{{}}.{ours}.up": Stored(f"{LAYER}{theirs}.up_proj.weight", "F,D->DF"),
        f"layers.{{}}.{ours}.down": Stored(f"{LAYER}{theirs}.down_proj.weight", "D,F->FD"),
    }


def plain_ffn_names(up: str, down: str, layer: str = LAYER) -> dict[str, Stored]:
    """Return the names of the projections and biases of a feed-forward layer without a gate."""
    return {
        "layers.{}.ffn.up": Stored(f"{layer}{up}.weight", "F,D->DF"),
        "layers.{}.ffn.up_bias": Stored(f"{layer}{up}.bias", "F->F"),
        "layers.{}.ffn.down": Stored(f"{layer}{down}.weight", "D,F->FD"),
        "layers.{}.ffn.down_bias": Stored(f"{layer}{down}.bias", "D->D"),
    }


def expert_names(block: str, gate: str, up: str, down: str) -> dict[str, Stored]:
    """Return the names of a router and of experts; each expert has separate tensors."""
    return {
        "layers.{}.ffn.router": Stored(f"{LAYER}{block}.gate.weight", "E,D->DE"),
        "layers.{}.ffn.experts.gate": Stored(f"{LAYER}{block}.experts.{{}}.{gate}.weight", "F,D->EDF"),
        "layers.{}.ffn.experts.up": Stored(f"{LAYER}{block}.experts.{{}}.{up}.weight", "F,D->EDF"),
        "layers.{}.ffn.experts.down": Stored(f"{LAYER}{block}.experts.{{}}.{down}.weight", "D,F->EFD"),
    }


FFN = gated_ffn_names("ffn", "mlp")
BACKBONE, BIASES = OUTER_NAMES | NORMS | ATTENTION, QKV_BIASES | OUTPUT_BIAS
LLAMA = BACKBONE | FFN


def grouped_query_config(
    raw: fields.Raw, rope: Rope | None, size: int, kv_heads: int | None = None, **kinds: Any
) -> GroupedQuery:
    """Return attention with heads of `size`.

    `num_key_value_heads` is `kv_heads` if absent, and the number of all heads if null.
    """
    heads = fields.integer(raw, "num_attention_heads")
    key_heads = fields.nullable(fields.integer, raw, "num_key_value_heads", kv_heads) or heads
    if heads % key_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {key_heads}")
    if kinds.get("rotary_size") == size:
        kinds["rotary_size"] = None
    return GroupedQuery(heads, key_heads, size, rope, **kinds)


def partial_rotary_attention_config(
    raw: fields.Raw, size: int, length: int, share: float, theta: float = 10000.0, **kinds: Any
) -> GroupedQuery:
    """Return attention that rotates a share of each head: `partial_rotary_factor`, or else `share`."""
    rotary_size = ropes.rotary_size(raw, size, share)
    rope = ropes.read_rope(raw, rotary_size, length=length, theta=theta, partial=True)
    return grouped_query_config(raw, rope, size, rotary_size=rotary_size, **kinds)


def dense_ffn_config(raw: fields.Raw, activation: Activation | None = None, **kinds: Any) -> Dense:
    """Return a feed-forward layer, gated unless `kinds` state otherwise. The default activation is
    `hidden_act`."""
    activation = activation or fields.activation(raw, "hidden_act", "silu")
    return Dense(fields.integer(raw, "intermediate_size"), activation, **kinds)


def dense_head(raw: fields.Raw, first: int) -> list[str]:
    """Return types of feed-forward layers: the `first` are "dense", and the others "sparse"."""
    return ["dense" if i < first else "sparse" for i in range(num_layers(raw))]


def typed_ffn_configs(raw: fields.Raw, experts: Experts, types: list[str]) -> list[Dense | Experts]:
    """Return each layer's feed-forward layer, by `mlp_layer_types` or else `types`: `experts` if "sparse"."""
    kinds = fields.layer_types(raw, types, ("dense", "sparse"), "mlp_layer_types")
    return [experts if kind == "sparse" else dense_ffn_config(raw) for kind in kinds]


def experts_config(raw: fields.Raw, count: int, active: Any, size: int, **kinds: Any) -> Experts:
    """Return a mixture of `count` experts of `size`. Each token uses `num_experts_per_tok`, or else `active`
    experts."""
    active = fields.integer(raw, "num_experts_per_tok", active)
    return Experts(count, active, size, fields.activation(raw, "hidden_act", "silu"), **kinds)


def uniform_window(raw: fields.Raw, default: int | None) -> int | None:
    """Return `sliding_window` for families in which all layers have it or none. Other `layer_types` are
    refused."""
    window = fields.nullable(fields.integer, raw, "sliding_window", default)
    kind = "full_attention" if window is None else "sliding_attention"
    for layer_type in fields.layer_types(raw, [kind] * num_layers(raw)):
        fields.allow_only({"layer_types": layer_type}, "layer_types", kind)
    return window


def windows(raw: fields.Raw, types: list[str], window: int | None) -> list[int | None]:
    """Return each layer's window in tokens, or None, by `layer_types` or else `types`."""
    layer_types = fields.layer_types(raw, types)
    if window is None and "sliding_attention" in layer_types:
        raise ValueError("layer_types holds 'sliding_attention', but there is no sliding_window")
    return [window if kind == "sliding_attention" else None for kind in layer_types]


def sliding_pattern(raw: fields.Raw, interval: int) -> list[str]:
    """Return layer types in which every `interval`-th layer has full attention, and the others a window."""
    return ["sliding_attention" if (i + 1) % interval else "full_attention" for i in range(num_layers(raw))]


def full_pattern(raw: fields.Raw) -> list[str]:
    """Return layer types in which the first and every fourth layer after it has full attention."""
    return ["sliding_attention" if i % 4 else "full_attention" for i in range(num_layers(raw))]


def sliding_tail(raw: fields.Raw, window: int | None, default: int) -> list[str]:
    """Return layer types in which layers from `max_window_layers` (or else `default`) on have the window, if
    any."""
    first = fields.non_negative_integer(raw, "max_window_layers", default)
    return [
        "full_attention" if window is None or i < first else "sliding_attention"
        for i in range(num_layers(raw))
    ]


def nullable_head_size(raw: fields.Raw, default: int) -> int:
    """Return `head_dim`: `default` if absent, and the model's width divided by its heads if null."""
    return fields.head_size(raw, None if "head_dim" in raw else default)


def num_layers(raw: fields.Raw) -> int:
    """Return the number of layers."""
    return fields.layer_count(raw, "num_hidden_layers")


def model_config(
    raw: fields.Raw,
    layers: list[LayerKind] | LayerKind,
    max_position: int,
    norm: NormKind,
    tied: bool = False,
    **options: Any,
) -> ModelConfig:
    """Return a model of these layers, or of `num_hidden_layers` layers of one kind.

    max_position, tied: defaults of `max_position_embeddings` and `tie_word_embeddings`.
    """
    return ModelConfig(
        vocab_size=fields.integer(raw, "vocab_size"),
        hidden_size=fields.integer(raw, "hidden_size"),
        layers=(layers,) * num_layers(raw) if isinstance(layers, LayerKind) else tuple(layers),
        max_position=fields.integer(raw, "max_position_embeddings", max_position),
        norm=norm,
        tied_embeddings=fields.flag(raw, "tie_word_embeddings", tied),
        **options,
    )


def rms_norm_config(raw: fields.Raw, default: float = 1e-6, offset: float = 0.0) -> NormKind:
    """Return an RMS norm; `default` is the default of `rms_norm_eps`."""
    return NormKind(eps=fields.number(raw, "rms_norm_eps", default), offset=offset)


def layer_norm_config(raw: fields.Raw, name: str, bias: bool = True, offset: float = 0.0) -> NormKind:
    """Return a layer norm, whose epsilon is the field `name`."""
    return NormKind("layer", fields.number(raw, name, 1e-5), offset, bias)

"""Shared parts of Llama-like families: names of tensors, and pieces of the configuration."""

from typing import Any

from ...model.config import Activation, Dense, Experts, GroupedQuery, LayerKind, ModelConfig, NormKind
from ...model.rope import Rope
from . import fields, ropes
from .stored import Stored

LAYER = "model.layers.{}."
OUTSIDE = {
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
# gains of each head's own
WIDE_QK_NORMS = {
    "layers.{}.attention.q_norm": Stored(LAYER + "self_attn.q_norm.weight", "NH->NH"),
    "layers.{}.attention.k_norm": Stored(LAYER + "self_attn.k_norm.weight", "KH->KH"),
}
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
IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
BEYOND = (r"model\.layers\.(?P<beyond>\d+)\..*",)  # layers that predict several tokens ahead


def gated(ours: str, theirs: str) -> dict[str, Stored]:
    """The projections of a gated feed-forward layer."""
    return {
        f"layers.{{}}.{ours}.gate": Stored(f"{LAYER}{theirs}.gate_proj.weight", "F,D->DF"),
        f"layers.{{}}.{ours}.up": Stored(f"{LAYER}{theirs}.up_proj.weight", "F,D->DF"),
        f"layers.{{}}.{ours}.down": Stored(f"{LAYER}{theirs}.down_proj.weight", "D,F->FD"),
    }


def plain(up: str, down: str, layer: str = LAYER) -> dict[str, Stored]:
    """The projections of a feed-forward layer without a gate, and their biases."""
    return {
        "layers.{}.ffn.up": Stored(f"{layer}{up}.weight", "F,D->DF"),
        "layers.{}.ffn.up_bias": Stored(f"{layer}{up}.bias", "F->F"),
        "layers.{}.ffn.down": Stored(f"{layer}{down}.weight", "D,F->FD"),
        "layers.{}.ffn.down_bias": Stored(f"{layer}{down}.bias", "D->D"),
    }


def experts(block: str, gate: str, up: str, down: str) -> dict[str, Stored]:
    """A router, and experts each of which has tensors of its own."""
    return {
        "layers.{}.ffn.router": Stored(f"{LAYER}{block}.gate.weight", "E,D->DE"),
        "layers.{}.ffn.experts.gate": Stored(f"{LAYER}{block}.experts.{{}}.{gate}.weight", "F,D->EDF"),
        "layers.{}.ffn.experts.up": Stored(f"{LAYER}{block}.experts.{{}}.{up}.weight", "F,D->EDF"),
        "layers.{}.ffn.experts.down": Stored(f"{LAYER}{block}.experts.{{}}.{down}.weight", "D,F->EFD"),
    }


FFN = gated("ffn", "mlp")
BACKBONE, BIASES = OUTSIDE | NORMS | ATTENTION, QKV_BIASES | OUTPUT_BIAS
LLAMA = BACKBONE | FFN


def grouped_query(
    raw: fields.Raw, rope: Rope | None, size: int, kv_heads: int | None = None, **kinds: Any
) -> GroupedQuery:
    """Attention with heads of `size`; `num_key_value_heads` is `kv_heads` if absent, and all heads if
    null."""
    heads = fields.integer(raw, "num_attention_heads")
    found = fields.nullable(fields.integer, raw, "num_key_value_heads", kv_heads) or heads
    if heads % found:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {found}")
    if kinds.get("rotary_size") == size:
        kinds["rotary_size"] = None
    return GroupedQuery(heads, found, size, rope, **kinds)


def partly_turned(
    raw: fields.Raw, size: int, length: int, share: float, theta: float = 10000.0, **kinds: Any
) -> GroupedQuery:
    """Attention that turns a part of each head, `partial_rotary_factor` or else `share`."""
    turned = ropes.rotary_size(raw, size, share)
    turn = ropes.rope(raw, turned, length=length, theta=theta, partial=True)
    return grouped_query(raw, turn, size, rotary_size=turned, **kinds)


def dense(raw: fields.Raw, activation: Activation | None = None, **kinds: Any) -> Dense:
    """A feed-forward layer, gated unless `kinds` say otherwise, its activation `hidden_act` if not given."""
    activation = activation or fields.activation(raw, "hidden_act", "silu")
    return Dense(fields.integer(raw, "intermediate_size"), activation, **kinds)


def mixture(raw: fields.Raw, count: int, active: Any, size: int, **kinds: Any) -> Experts:
    """A mixture of `count` experts of `size`; each token goes to `num_experts_per_tok` or else `active`."""
    active = fields.integer(raw, "num_experts_per_tok", active)
    return Experts(count, active, size, fields.activation(raw, "hidden_act", "silu"), **kinds)


def one_window(raw: fields.Raw, default: int | None) -> int | None:
    """`sliding_window` where it is that of all layers; transformers does not look at `layer_types` there."""
    window = fields.nullable(fields.integer, raw, "sliding_window", default)
    kind = "full_attention" if window is None else "sliding_attention"
    for found in fields.layer_types(raw, [kind] * num_layers(raw)):
        fields.only({"layer_types": found}, "layer_types", kind)
    return window


def windows(raw: fields.Raw, types: list[str], window: int | None) -> list[int | None]:
    """Each layer's window, by `layer_types` or else `types`."""
    found = fields.layer_types(raw, types)
    if window is None and "sliding_attention" in found:
        raise ValueError("layer_types holds 'sliding_attention', but there is no sliding_window")
    return [window if kind == "sliding_attention" else None for kind in found]


def patterned(raw: fields.Raw, pattern: int) -> list[str]:
    """Layer types of which all have a window but every `pattern`-th."""
    return ["sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(num_layers(raw))]


def windowed_from(raw: fields.Raw, window: int | None, default: int) -> list[str]:
    """Layer types where layers from `max_window_layers` (or else `default`) on have a window, if there is
    one."""
    first = fields.count(raw, "max_window_layers", default)
    return [
        "full_attention" if window is None or i < first else "sliding_attention"
        for i in range(num_layers(raw))
    ]


def nullable_head_size(raw: fields.Raw, default: int) -> int:
    """`head_dim`, `default` if absent, and the model's width divided among its heads if null."""
    return fields.head_size(raw, None if "head_dim" in raw else default)


def num_layers(raw: fields.Raw) -> int:
    return fields.layers(raw, "num_hidden_layers")


def decoder(
    raw: fields.Raw,
    layers: list[LayerKind] | LayerKind,
    max_position: int,
    norm: NormKind,
    tied: bool = False,
    **more: Any,
) -> ModelConfig:
    """A model of these layers, or all of whose layers are of one kind; the rest has defaults for
    `max_position_embeddings` and `tie_word_embeddings`."""
    return ModelConfig(
        vocab_size=fields.integer(raw, "vocab_size"),
        hidden_size=fields.integer(raw, "hidden_size"),
        layers=(layers,) * num_layers(raw) if isinstance(layers, LayerKind) else tuple(layers),
        max_position=fields.integer(raw, "max_position_embeddings", max_position),
        norm=norm,
        tied_embeddings=fields.flag(raw, "tie_word_embeddings", tied),
        **more,
    )


def rms(raw: fields.Raw, default: float = 1e-6, offset: float = 0.0) -> NormKind:
    return NormKind(eps=fields.number(raw, "rms_norm_eps", default), offset=offset)


def layer_norm(raw: fields.Raw, name: str, bias: bool = True, offset: float = 0.0) -> NormKind:
    return NormKind("layer", fields.number(raw, name, 1e-5), offset, bias)

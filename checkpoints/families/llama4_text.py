"""Llama 4's text models (Meta, 2025): attention in chunks that turns and norms queries and keys, full
attention that does neither on every fourth layer, and experts whose inputs are weighted."""

from dataclasses import replace

from ...model.config import Activation, Dense, Experts, GroupedQuery, LayerKind, ModelConfig, NormKind
from ...model.rope import Rope
from ...refusals import shown
from . import fields, parts, smollm3
from .family import Family
from .ropes import rope
from .stored import Stored

LENGTH = 131072
BLOCK = parts.LAYER + "feed_forward."
GATE_UP = BLOCK + "experts.gate_up_proj"
MIXTURE = parts.gated("ffn.shared", "feed_forward.shared_expert") | {
    "layers.{}.ffn.router": Stored(BLOCK + "router.weight", "E,D->DE"),
    "layers.{}.ffn.experts.gate": Stored(GATE_UP, "E,D,[F]->EDF"),
    "layers.{}.ffn.experts.up": Stored(GATE_UP, "E,D,[F]->EDF"),
    "layers.{}.ffn.experts.down": Stored(BLOCK + "experts.down_proj", "E,F,D->EFD"),
}
NAMES = parts.BACKBONE | parts.BIASES | parts.gated("ffn", "feed_forward") | MIXTURE
CHUNKED = "chunked_attention"


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Llama4TextConfig."""
    turned = turns(raw)
    types = fields.layer_types(
        raw, [CHUNKED if here else "full_attention" for here in turned], ("full_attention", CHUNKED)
    )
    layers = [
        LayerKind(attention(raw, here, chunk(raw) if kind == CHUNKED else None), ffn)
        for here, kind, ffn in zip(turned, types, ffns(raw), strict=True)
    ]
    return parts.decoder(raw, layers, LENGTH, parts.rms(raw, 1e-5))


def turns(raw: fields.Raw) -> list[bool]:
    """Which layers turn queries and keys; an empty list of them says nothing."""
    return smollm3.turns({**raw, "no_rope_layers": fields.value(raw, "no_rope_layers", None) or None})


def chunk(raw: fields.Raw) -> int:
    size = fields.nullable(fields.integer, raw, "attention_chunk_size", 8192)
    if size is None:
        raise ValueError("layer_types holds 'chunked_attention', but there is no attention_chunk_size")
    return size


def attention(raw: fields.Raw, turns: bool, chunk: int | None) -> GroupedQuery:
    size, bias = fields.head_size(raw, 128), fields.flag(raw, "attention_bias", False)
    own = replace(rope(raw, size, length=LENGTH, theta=500000.0), interleaved=True)
    norm = (
        NormKind(eps=parts.rms(raw, 1e-5).eps, gain=False) if fields.flag(raw, "use_qk_norm", True) else None
    )
    return parts.grouped_query(
        raw,
        own if turns else temperature(raw),
        size,
        kv_heads=8,
        rotary_size=None if turns else 0,
        window=chunk,
        chunked=chunk is not None,
        bias=bias,
        output_bias=bias,
        qk_norm=norm if turns else None,
        norm_turned=True,
    )


def temperature(raw: fields.Raw) -> Rope | None:
    """Queries of layers that do not turn them grow with their position; files of 2025 have a number for
    true."""
    tuned = fields.value(raw, "attn_temperature_tuning", True)
    if type(tuned) not in (bool, int) or tuned < 0:
        raise ValueError(f"attn_temperature_tuning is {shown(tuned)}, expected true or false")
    length, growth = fields.integer(raw, "floor_scale", 8192), fields.number(raw, "attn_scale", 0.1)
    if not tuned:
        return None
    return Rope(original_max_position=length, query_growth=growth, growth_from=1)


def ffns(raw: fields.Raw) -> list[Dense | Experts]:
    """Layers of `moe_layers`, or else every `interleave_moe_layer_step`-th one, are mixtures of experts."""
    count, step = parts.num_layers(raw), fields.integer(raw, "interleave_moe_layer_step", 1)
    mixed = fields.indices(raw, "moe_layers", range(step - 1, count, step))
    activation = fields.activation(raw, "hidden_act", "silu")
    dense = Dense(fields.integer(raw, "intermediate_size_mlp", 16384), activation)
    mixture = experts(raw, activation)
    return [mixture if i in mixed else dense for i in range(count)]


def experts(raw: fields.Raw, activation: Activation) -> Experts:
    size = fields.integer(raw, "intermediate_size")
    return Experts(
        count=fields.experts(raw, "num_local_experts", 16),
        active=fields.integer(raw, "num_experts_per_tok", 1),
        size=size,
        activation=activation,
        scoring="sigmoid",
        normalised=False,
        shared=size,
        weighs_inputs=True,
    )


FAMILY = Family(config, NAMES, parts.IGNORED)

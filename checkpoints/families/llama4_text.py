"""Llama 4's text models (Meta, 2025): attention in chunks with a rope and normed queries and keys. Every
fourth layer has full attention without both. Experts' inputs are weighted."""

from dataclasses import replace

from ...model.config import Activation, Dense, Experts, GroupedQuery, LayerKind, ModelConfig, NormKind
from ...model.rope import Rope
from ...refusals import quote
from . import fields, parts, smollm3
from .family import Family
from .ropes import read_rope
from .storage import Stored

LENGTH = 131072
BLOCK = parts.LAYER + "feed_forward."
GATE_UP = BLOCK + "experts.gate_up_proj"
MIXTURE = parts.gated_ffn_names("ffn.shared", "feed_forward.shared_expert") | {
    "layers.{}.ffn.router": Stored(BLOCK + "router.weight", "E,D->DE"),
    "layers.{}.ffn.experts.gate": Stored(GATE_UP, "E,D,[F]->EDF"),
    "layers.{}.ffn.experts.up": Stored(GATE_UP, "E,D,[F]->EDF"),
    "layers.{}.ffn.experts.down": Stored(BLOCK + "experts.down_proj", "E,F,D->EFD"),
}
NAMES = parts.BACKBONE | parts.BIASES | parts.gated_ffn_names("ffn", "feed_forward") | MIXTURE
CHUNKED = "chunked_attention"


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Llama4TextConfig."""
    has_rope = rope_layers(raw)
    types = fields.layer_types(
        raw, [CHUNKED if rotates else "full_attention" for rotates in has_rope], ("full_attention", CHUNKED)
    )
    layers = [
        LayerKind(attention_config(raw, rotates, chunk_size(raw) if kind == CHUNKED else None), ffn)
        for rotates, kind, ffn in zip(has_rope, types, ffn_configs(raw), strict=True)
    ]
    return parts.model_config(raw, layers, LENGTH, parts.rms_norm_config(raw, 1e-5))


def rope_layers(raw: fields.Raw) -> list[bool]:
    """Return True for each layer that has a rope. An empty `no_rope_layers` counts as absent."""
    return smollm3.rope_layers({**raw, "no_rope_layers": fields.value(raw, "no_rope_layers", None) or None})


def chunk_size(raw: fields.Raw) -> int:
    """Return the number of tokens in a chunk of attention. Raises ValueError if it is null."""
    size = fields.nullable(fields.integer, raw, "attention_chunk_size", 8192)
    if size is None:
        raise ValueError("layer_types holds 'chunked_attention', but there is no attention_chunk_size")
    return size


def attention_config(raw: fields.Raw, has_rope: bool, chunk: int | None) -> GroupedQuery:
    """Return a layer's attention, with a rope or without; `chunk` tokens see each other, None is full
    attention."""
    size, bias = fields.head_size(raw, 128), fields.flag(raw, "attention_bias", False)
    rope = replace(read_rope(raw, size, length=LENGTH, theta=500000.0), interleaved=True)
    norm = (
        NormKind(eps=parts.rms_norm_config(raw, 1e-5).eps, gain=False)
        if fields.flag(raw, "use_qk_norm", True)
        else None
    )
    return parts.grouped_query_config(
        raw,
        rope if has_rope else temperature_rope(raw),
        size,
        kv_heads=8,
        rotary_size=None if has_rope else 0,
        window=chunk,
        chunked=chunk is not None,
        bias=bias,
        output_bias=bias,
        qk_norm=norm if has_rope else None,
        norm_after_rope=True,
    )


def temperature_rope(raw: fields.Raw) -> Rope | None:
    """Return the scaling by position of queries without a rope, or None if it is off.

    Files of 2025 have a number for true.
    """
    tuning = fields.value(raw, "attn_temperature_tuning", True)
    if type(tuning) not in (bool, int) or tuning < 0:
        raise ValueError(f"attn_temperature_tuning is {quote(tuning)}, expected true or false")
    length, growth = fields.integer(raw, "floor_scale", 8192), fields.number(raw, "attn_scale", 0.1)
    if not tuning:
        return None
    return Rope(original_max_position=length, query_growth=growth, growth_offset=1)


def ffn_configs(raw: fields.Raw) -> list[Dense | Experts]:
    """Return each layer's feed-forward layer.

    Layers of `moe_layers`, or else every `interleave_moe_layer_step`-th one, are mixtures of experts.
    """
    count, step = parts.num_layers(raw), fields.integer(raw, "interleave_moe_layer_step", 1)
    mixed = fields.layer_indices(raw, "moe_layers", range(step - 1, count, step))
    activation = fields.activation(raw, "hidden_act", "silu")
    dense = Dense(fields.integer(raw, "intermediate_size_mlp", 16384), activation)
    mixture = experts_config(raw, activation)
    return [mixture if i in mixed else dense for i in range(count)]


def experts_config(raw: fields.Raw, activation: Activation) -> Experts:
    """Return experts whose inputs are weighted."""
    size = fields.integer(raw, "intermediate_size")
    return Experts(
        count=fields.expert_count(raw, "num_local_experts", 16),
        active=fields.integer(raw, "num_experts_per_tok", 1),
        size=size,
        activation=activation,
        scoring="sigmoid",
        normalised=False,
        shared=size,
        weighs_inputs=True,
    )


FAMILY = Family(parse_config, NAMES)

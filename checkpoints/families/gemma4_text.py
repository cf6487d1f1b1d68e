"""Gemma 4's text models (Google DeepMind, 2026): Gemma 3 with wide heads on layers without a window, normed
values, and inputs of each layer's own; later layers may read the keys of earlier ones, values be made as keys
are, and experts stand beside the feed-forward layer."""

from collections.abc import Mapping
from typing import Any

from ...model.config import Dense, Experts, GroupedQuery, LayerInput, LayerKind, ModelConfig, NormKind
from ...model.rope import Rope
from ...refusals import shown
from . import fields, gemma2, parts, ropes
from .family import Family
from .stored import Stored

LENGTH = 131072
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
FULL = "full_attention"
EXPERTS, ROUTER = parts.LAYER + "experts.", parts.LAYER + "router."


def norm(when: str, number: str = "") -> Stored:
    return Stored(f"{parts.LAYER}{when}_feedforward_layernorm{number}.weight", "D->D")


INPUTS = {
    "inputs.embed": Stored("model.embed_tokens_per_layer.weight", "V,LP->VLP"),
    "inputs.project": Stored("model.per_layer_model_projection.weight", "LP,D->DLP"),
    "inputs.norm.gain": Stored("model.per_layer_projection_norm.weight", "P->P"),
    "layers.{}.input.gate": Stored(parts.LAYER + "per_layer_input_gate.weight", "P,D->DP"),
    "layers.{}.input.down": Stored(parts.LAYER + "per_layer_projection.weight", "D,P->PD"),
    "layers.{}.input.post_norm.gain": Stored(parts.LAYER + "post_per_layer_input_norm.weight", "D->D"),
}
MIXTURE = parts.gated("ffn.shared", "mlp") | {
    "layers.{}.ffn.router": Stored(ROUTER + "proj.weight", "E,D->DE"),
    "layers.{}.ffn.scales": Stored(ROUTER + "per_expert_scale", "E->E"),
    "layers.{}.ffn.experts.gate": Stored(EXPERTS + "gate_up_proj", "E,[F],D->EDF"),
    "layers.{}.ffn.experts.up": Stored(EXPERTS + "gate_up_proj", "E,[F],D->EDF"),
    "layers.{}.ffn.experts.down": Stored(EXPERTS + "down_proj", "E,[D],F->EFD"),
    "layers.{}.ffn.norms.router.gain": Stored(ROUTER + "scale", "D->D"),
    "layers.{}.ffn.norms.shared.gain": norm("pre"),
    "layers.{}.ffn.norms.experts.gain": norm("pre", "_2"),
    "layers.{}.ffn.norms.shared_post.gain": norm("post", "_1"),
    "layers.{}.ffn.norms.experts_post.gain": norm("post", "_2"),
}
SCALE = {"layers.{}.scale": Stored(parts.LAYER + "layer_scalar", "O->O")}
NAMES = gemma2.NAMES | parts.QK_NORMS | INPUTS | MIXTURE | SCALE
BORROWED = r"model\.layers\.(?P<borrows>\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.(weight|bias)"


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Gemma4TextConfig."""
    fields.only(raw, "use_bidirectional_attention", "vision")
    fields.only(raw, "rope_scaling")
    types = layer_types(raw)
    sizes, back = head_sizes(raw, types), borrowed(raw, types)
    for i, n in enumerate(back):
        if sizes[i] != sizes[i - n]:
            raise ValueError(f"num_kv_shared_layers: layer {i} has other heads than layer {i - n} before it")
    window = fields.integer(raw, "sliding_window", 512)
    layers = [
        LayerKind(
            attention(raw, kind, *size, window=None if kind == FULL else window, borrows=n),
            ffn(raw, borrows=n > 0),
        )
        for kind, size, n in zip(types, sizes, back, strict=True)
    ]
    return parts.decoder(
        raw,
        layers,
        LENGTH,
        norm=parts.rms(raw),
        tied=True,
        post_norms=True,
        embedding_scale=fields.integer(raw, "hidden_size") ** 0.5,
        logit_softcap=fields.nullable(fields.number, raw, "final_logit_softcapping", None),
        layer_scales=True,
        layer_input=layer_input(raw),
    )


def layer_types(raw: fields.Raw) -> list[str]:
    """By default every sixth has no window; the last has none, whatever is stated."""
    return [*fields.layer_types(raw, parts.patterned(raw, 6))[:-1], FULL]


def head_sizes(raw: fields.Raw, types: list[str]) -> list[tuple[int, int]]:
    """Size and number of each layer's key heads: those without a window have others, by two fields or, as
    transformers writes it, layer by layer."""
    own = {"head_dim": fields.head_size(raw, 256), "num_key_value_heads": kv_heads(raw, 4)}
    wide = {"head_dim": fields.integer(raw, "global_head_dim", 512)}
    if fields.flag(raw, "attention_k_eq_v", False):
        few = fields.integer(raw, "num_global_key_value_heads", own["num_key_value_heads"])
        wide["num_key_value_heads"] = few
    stated = fields.value(
        raw, "per_layer_config", {str(i): wide for i, kind in enumerate(types) if kind == FULL}
    )
    if not isinstance(stated, Mapping) or not set(stated) <= set(map(str, range(len(types)))):
        raise ValueError(f"per_layer_config is {shown(stated)}, expected an object with numbers of layers")
    found = []
    for i in range(len(types)):
        layer = stated.get(str(i), {})
        if not isinstance(layer, Mapping) or not set(layer) <= set(own):
            raise ValueError(
                f"per_layer_config holds {shown(layer)}, which is not supported: expected head_dim and "
                "num_key_value_heads"
            )
        size, heads = (fields.integer(layer, name, own[name]) for name in own)
        found.append((size, heads))
    return found


def kv_heads(raw: fields.Raw, default: int) -> int:
    return fields.integer(raw, "num_key_value_heads", default)


def borrowed(raw: fields.Raw, types: list[str]) -> list[int]:
    """Distance of each layer to the layer whose keys it reads. The last `num_kv_shared_layers` read those of
    the last earlier layer of their type, the others (0) their own."""
    first = len(types) - fields.count(raw, "num_kv_shared_layers", 0)
    if set(types) != set(types[: max(first, 0)]):
        raise ValueError(
            f"num_kv_shared_layers is {len(types) - first}, expected layers of every type before those, of "
            f"{len(types)} in all"
        )
    last = {kind: i for i, kind in enumerate(types[:first])}
    return [max(i - last[kind], 0) if i >= first else 0 for i, kind in enumerate(types)]


def attention(raw: fields.Raw, kind: str, size: int, kv: int, **kinds: Any) -> GroupedQuery:
    norm, bias = parts.rms(raw), fields.flag(raw, "attention_bias", False)
    heads = fields.integer(raw, "num_attention_heads")
    if heads % kv:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of {kv} key heads")
    return GroupedQuery(
        heads,
        kv,
        size,
        rope(raw, kind, size),
        scale=1.0,
        bias=bias,
        output_bias=bias,
        qk_norm=norm,
        value_norm=NormKind(eps=norm.eps, gain=False),
        keys_as_values=kind == FULL and fields.flag(raw, "attention_k_eq_v", False),
        **kinds,
    )


def rope(raw: fields.Raw, kind: str, size: int) -> Rope:
    """Rope of a type of layers, for `size` dimensions of a head."""
    both = fields.value(raw, "rope_parameters", ROPES)
    found = both.get(kind) if isinstance(both, Mapping) else None
    if found is None or not isinstance(found, Mapping):
        raise ValueError(f"rope_parameters is {shown(both)}, expected objects for the types of layers")
    if found.get("rope_type") != "proportional":
        fields.only(found, "partial_rotary_factor", 1)
        length = {"max_position_embeddings": fields.integer(raw, "max_position_embeddings", LENGTH)}
        return ropes.scaled(length, found, f"rope of {kind}", size, 10000.0)
    share = fields.number(found, "partial_rotary_factor", 1.0, most=1.0)
    theta, factor = fields.number(found, "rope_theta", 10000.0), fields.number(found, "factor", 1.0)
    return Rope(theta, "proportional", factor, share=share)


def ffn(raw: fields.Raw, borrows: bool) -> Dense | Experts:
    """With `use_double_wide_mlp` that of layers that read other's keys is twice as wide."""
    wide = fields.flag(raw, "use_double_wide_mlp", False) and borrows
    size = fields.integer(raw, "intermediate_size") * (2 if wide else 1)
    activation = fields.activation(raw, "hidden_activation", "gelu_pytorch_tanh")
    if not fields.flag(raw, "enable_moe_block", False):
        return Dense(size, activation)
    return Experts(
        count=fields.experts(raw, "num_experts"),
        active=fields.integer(raw, "top_k_experts"),
        size=fields.integer(raw, "moe_intermediate_size"),
        activation=activation,
        shared=size,
        scales=True,
        norms=parts.rms(raw),
    )


def layer_input(raw: fields.Raw) -> LayerInput | None:
    size = fields.nullable(fields.count, raw, "hidden_size_per_layer_input", 256)
    if not size:
        return None
    known = fields.integer(raw, "vocab_size_per_layer_input", 262144)
    if known < fields.integer(raw, "vocab_size"):
        raise ValueError(f"vocab_size_per_layer_input is {known}, expected one for each of vocab_size")
    activation = fields.activation(raw, "hidden_activation", "gelu_pytorch_tanh")
    return LayerInput(size, known, activation)


FAMILY = Family(config, NAMES, (*parts.IGNORED, BORROWED))

"""Gemma 4's text models (Google DeepMind, 2026): Gemma 3 with wide heads on layers without a window, normed
values, and an input for each layer. Later layers may read the keys of earlier ones. Values may be projected
as keys are. Experts may stand beside the feed-forward layer."""

from collections.abc import Mapping
from typing import Any

from ...model.config import Dense, Experts, GroupedQuery, LayerInput, LayerKind, ModelConfig, NormKind
from ...model.rope import Rope
from ...refusals import quote
from . import fields, gemma2, parts, ropes
from .family import Family
from .storage import Stored

LENGTH = 131072
ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}
FULL = "full_attention"
EXPERTS, ROUTER = parts.LAYER + "experts.", parts.LAYER + "router."


def ffn_norm_storage(position: str, number: str = "") -> Stored:
    """Return the storage of a norm before ("pre") or after ("post") a feed-forward layer."""
    return Stored(f"{parts.LAYER}{position}_feedforward_layernorm{number}.weight", "D->D")


INPUTS = {
    "inputs.embed": Stored("model.embed_tokens_per_layer.weight", "V,LP->VLP"),
    "inputs.project": Stored("model.per_layer_model_projection.weight", "LP,D->DLP"),
    "inputs.norm.gain": Stored("model.per_layer_projection_norm.weight", "P->P"),
    "layers.{}.input.gate": Stored(parts.LAYER + "per_layer_input_gate.weight", "P,D->DP"),
    "layers.{}.input.down": Stored(parts.LAYER + "per_layer_projection.weight", "D,P->PD"),
    "layers.{}.input.post_norm.gain": Stored(parts.LAYER + "post_per_layer_input_norm.weight", "D->D"),
}
MIXTURE = parts.gated_ffn_names("ffn.shared", "mlp") | {
    "layers.{}.ffn.router": Stored(ROUTER + "proj.weight", "E,D->DE"),
    "layers.{}.ffn.scales": Stored(ROUTER + "per_expert_scale", "E->E"),
    "layers.{}.ffn.experts.gate": Stored(EXPERTS + "gate_up_proj", "E,[F],D->EDF"),
    "layers.{}.ffn.experts.up": Stored(EXPERTS + "gate_up_proj", "E,[F],D->EDF"),
    "layers.{}.ffn.experts.down": Stored(EXPERTS + "down_proj", "E,[D],F->EFD"),
    "layers.{}.ffn.norms.router.gain": Stored(ROUTER + "scale", "D->D"),
    "layers.{}.ffn.norms.shared.gain": ffn_norm_storage("pre"),
    "layers.{}.ffn.norms.experts.gain": ffn_norm_storage("pre", "_2"),
    "layers.{}.ffn.norms.shared_post.gain": ffn_norm_storage("post", "_1"),
    "layers.{}.ffn.norms.experts_post.gain": ffn_norm_storage("post", "_2"),
}
SCALE = {"layers.{}.scale": Stored(parts.LAYER + "layer_scalar", "O->O")}
NAMES = gemma2.NAMES | parts.QK_NORMS | INPUTS | MIXTURE | SCALE
BORROWED_KEYS = r"model\.layers\.(?P<borrows>\d+)\.self_attn\.(k_proj|v_proj|k_norm)\.(weight|bias)"


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Gemma4TextConfig."""
    fields.allow_only(raw, "use_bidirectional_attention", "vision")
    fields.allow_only(raw, "rope_scaling")
    types = layer_types(raw)
    sizes, distances = head_sizes(raw, types), kv_sharing_distances(raw, types)
    for i, n in enumerate(distances):
        if sizes[i] != sizes[i - n]:
            raise ValueError(f"num_kv_shared_layers: layer {i} has other heads than layer {i - n} before it")
    window = fields.integer(raw, "sliding_window", 512)
    layers = [
        LayerKind(
            attention_config(raw, kind, *size, window=None if kind == FULL else window, kv_layers_back=n),
            ffn_config(raw, borrows=n > 0),
        )
        for kind, size, n in zip(types, sizes, distances, strict=True)
    ]
    return parts.model_config(
        raw,
        layers,
        LENGTH,
        norm=parts.rms_norm_config(raw),
        tied=True,
        post_norms=True,
        embedding_scale=fields.integer(raw, "hidden_size") ** 0.5,
        logit_softcap=fields.nullable(fields.number, raw, "final_logit_softcapping", None),
        layer_scales=True,
        layer_input=layer_input_config(raw),
    )


def layer_types(raw: fields.Raw) -> list[str]:
    """Return the type of each layer. By default every sixth has no window; the last never has one."""
    return [*fields.layer_types(raw, parts.sliding_pattern(raw, 6))[:-1], FULL]


def head_sizes(raw: fields.Raw, types: list[str]) -> list[tuple[int, int]]:
    """Return the head size and the number of key heads of each layer.

    Layers without a window have other ones, by two fields, or layer by layer as transformers writes them.
    """
    local = {"head_dim": fields.head_size(raw, 256), "num_key_value_heads": kv_heads(raw, 4)}
    wide = {"head_dim": fields.integer(raw, "global_head_dim", 512)}
    if fields.flag(raw, "attention_k_eq_v", False):
        num_kv_heads = fields.integer(raw, "num_global_key_value_heads", local["num_key_value_heads"])
        wide["num_key_value_heads"] = num_kv_heads
    stated = fields.value(
        raw, "per_layer_config", {str(i): wide for i, kind in enumerate(types) if kind == FULL}
    )
    if not isinstance(stated, Mapping) or not set(stated) <= set(map(str, range(len(types)))):
        raise ValueError(f"per_layer_config is {quote(stated)}, expected an object with numbers of layers")
    sizes = []
    for i in range(len(types)):
        layer = stated.get(str(i), {})
        if not isinstance(layer, Mapping) or not set(layer) <= set(local):
            raise ValueError(
                f"per_layer_config holds {quote(layer)}, which is not supported: expected head_dim and "
                "num_key_value_heads"
            )
        size, heads = (fields.integer(layer, name, local[name]) for name in local)
        sizes.append((size, heads))
    return sizes


def kv_heads(raw: fields.Raw, default: int) -> int:
    """Return the number of key heads."""
    return fields.integer(raw, "num_key_value_heads", default)


def kv_sharing_distances(raw: fields.Raw, types: list[str]) -> list[int]:
    """Return how many layers back the layer is whose keys a layer reads; 0 if it has keys.

    The last `num_kv_shared_layers` read keys of the last earlier layer of their type.
    """
    first = len(types) - fields.non_negative_integer(raw, "num_kv_shared_layers", 0)
    if set(types) != set(types[: max(first, 0)]):
        raise ValueError(
            f"num_kv_shared_layers is {len(types) - first}, expected layers of every type before those, of "
            f"{len(types)} in all"
        )
    last = {kind: i for i, kind in enumerate(types[:first])}
    return [max(i - last[kind], 0) if i >= first else 0 for i, kind in enumerate(types)]


def attention_config(raw: fields.Raw, kind: str, size: int, kv: int, **kinds: Any) -> GroupedQuery:
    """Return attention of a type of layers."""
    norm, bias = parts.rms_norm_config(raw), fields.flag(raw, "attention_bias", False)
    heads = fields.integer(raw, "num_attention_heads")
    if heads % kv:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of {kv} key heads")
    return GroupedQuery(
        heads,
        kv,
        size,
        layer_rope(raw, kind, size),
        scale=1.0,
        bias=bias,
        output_bias=bias,
        qk_norm=norm,
        value_norm=NormKind(eps=norm.eps, gain=False),
        keys_as_values=kind == FULL and fields.flag(raw, "attention_k_eq_v", False),
        **kinds,
    )


def layer_rope(raw: fields.Raw, kind: str, size: int) -> Rope:
    """Return the rope of a type of layers, for `size` dimensions of a head."""
    layer_ropes = fields.value(raw, "rope_parameters", ROPES)
    stated = layer_ropes.get(kind) if isinstance(layer_ropes, Mapping) else None
    if stated is None or not isinstance(stated, Mapping):
        raise ValueError(f"rope_parameters is {quote(layer_ropes)}, expected objects for the types of layers")
    if stated.get("rope_type") != "proportional":
        fields.allow_only(stated, "partial_rotary_factor", 1)
        length = {"max_position_embeddings": fields.integer(raw, "max_position_embeddings", LENGTH)}
        return ropes.parse_rope(length, stated, f"rope of {kind}", size, 10000.0)
    share = fields.number(stated, "partial_rotary_factor", 1.0, maximum=1.0)
    theta, factor = fields.number(stated, "rope_theta", 10000.0), fields.number(stated, "factor", 1.0)
    return Rope(theta, "proportional", factor, partial_rotary_factor=share)


def ffn_config(raw: fields.Raw, borrows: bool) -> Dense | Experts:
    """Return a feed-forward layer. With `use_double_wide_mlp`, layers that read other layers' keys are twice
    as wide."""
    is_wide = fields.flag(raw, "use_double_wide_mlp", False) and borrows
    size = fields.integer(raw, "intermediate_size") * (2 if is_wide else 1)
    activation = fields.activation(raw, "hidden_activation", "gelu_pytorch_tanh")
    if not fields.flag(raw, "enable_moe_block", False):
        return Dense(size, activation)
    return Experts(
        count=fields.expert_count(raw, "num_experts"),
        active=fields.integer(raw, "top_k_experts"),
        size=fields.integer(raw, "moe_intermediate_size"),
        activation=activation,
        shared=size,
        scales=True,
        norms=parts.rms_norm_config(raw),
    )


def layer_input_config(raw: fields.Raw) -> LayerInput | None:
    """Return the per-layer embeddings, or None."""
    size = fields.nullable(fields.non_negative_integer, raw, "hidden_size_per_layer_input", 256)
    if not size:
        return None
    vocab_size = fields.integer(raw, "vocab_size_per_layer_input", 262144)
    if vocab_size < fields.integer(raw, "vocab_size"):
        raise ValueError(f"vocab_size_per_layer_input is {vocab_size}, expected one for each of vocab_size")
    activation = fields.activation(raw, "hidden_activation", "gelu_pytorch_tanh")
    return LayerInput(size, vocab_size, activation)


FAMILY = Family(parse_config, NAMES, (BORROWED_KEYS,))

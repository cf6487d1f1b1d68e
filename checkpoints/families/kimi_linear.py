"""Kimi Linear (Moonshot AI, arXiv 2510.26692): Kimi Delta Attention on most layers, latent attention without
positions on the others, and DeepSeek-V3's mixtures of experts."""

from collections.abc import Mapping
from typing import Any

from ...model.config import Dense, Experts, Latent, LayerKind, ModelConfig
from ...model.recurrent.kinds import DeltaNet
from ...refusals import quote
from . import deepseek, fields, parts
from .family import Family
from .storage import Stored

MIXER, BLOCK = parts.LAYER + "self_attn.", "block_sparse_moe."
RECURRENT = {
    "layers.{}.recurrent.q": Stored(MIXER + "q_proj.weight", "KH,D->DKH"),
    "layers.{}.recurrent.k": Stored(MIXER + "k_proj.weight", "KH,D->DKH"),
    "layers.{}.recurrent.v": Stored(MIXER + "v_proj.weight", "KGU,D->DKGU"),
    "layers.{}.recurrent.rate": Stored(MIXER + "b_proj.weight", "KG,D->DKG"),
    "layers.{}.recurrent.decay": Stored(MIXER + "f_b_proj.weight", "KGH,R->RKGH"),
    "layers.{}.recurrent.gate": Stored(MIXER + "g_b_proj.weight", "KGU,R->RKGU"),
    "layers.{}.recurrent.q_conv": Stored(MIXER + "q_conv1d.weight", "KH,1,Z->KHZ"),
    "layers.{}.recurrent.k_conv": Stored(MIXER + "k_conv1d.weight", "KH,1,Z->KHZ"),
    "layers.{}.recurrent.v_conv": Stored(MIXER + "v_conv1d.weight", "KGU,1,Z->KGUZ"),
    "layers.{}.recurrent.decay_log": Stored(MIXER + "A_log", "1,1,KG,1->KG"),
    "layers.{}.recurrent.decay_bias": Stored(MIXER + "dt_bias", "KGH->KGH"),
    "layers.{}.recurrent.norm": Stored(MIXER + "o_norm.weight", "U->U"),
    "layers.{}.recurrent.o": Stored(MIXER + "o_proj.weight", "D,KGU->KGUD"),
    "layers.{}.recurrent.decay_down": Stored(MIXER + "f_a_proj.weight", "R,D->DR"),
    "layers.{}.recurrent.gate_down": Stored(MIXER + "g_a_proj.weight", "R,D->DR"),
}
MIXTURE = (
    parts.expert_names("block_sparse_moe", "w1", "w3", "w2")
    | parts.gated_ffn_names("ffn.shared", BLOCK + "shared_experts")
    | {"layers.{}.ffn.correction": Stored(parts.LAYER + BLOCK + "gate.e_score_correction_bias", "E->E")}
)
NAMES = deepseek.NAMES | MIXTURE | RECURRENT
# in folders that transformers saves; the hub's have `mlp`
SAVED_FFN_NAMES = parts.gated_ffn_names("ffn", "block_sparse_moe")
FIXED_FIELDS = {
    "hidden_act": "silu",
    "mla_use_nope": True,
    "moe_layer_freq": 1,
    "tie_word_embeddings": False,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
}
ALLOWED = {"full_attn_layers", "kda_layers", "num_heads", "head_dim", "short_conv_kernel_size"}
MIXERS = ("full_attention", "linear_attention")


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' KimiLinearConfig."""
    for name, value in FIXED_FIELDS.items():
        fields.allow_only(raw, name, value)
    linear = fields.value(raw, "linear_attn_config", {})
    if not isinstance(linear, Mapping) or set(linear) - ALLOWED:
        raise ValueError(
            f"linear_attn_config is {quote(linear)}, expected an object with {', '.join(sorted(ALLOWED))}"
        )
    mixers = {
        "full_attention": latent_attention_config(raw),
        "linear_attention": delta_net_config(raw, linear),
    }
    layers = [
        LayerKind(mixers[kind], ffn)
        for kind, ffn in zip(layer_types(raw, linear), ffn_configs(raw), strict=True)
    ]
    length = fields.present_name(raw, "model_max_length", "max_position_embeddings")
    max_position = {"max_position_embeddings": fields.integer(raw, length, 1048576)}
    return parts.model_config(
        {**raw, **max_position}, layers, max_position=1048576, norm=parts.rms_norm_config(raw, 1e-5)
    )


def latent_attention_config(raw: fields.Raw) -> Latent:
    """Return latent attention without positions."""
    heads = fields.integer(raw, "num_attention_heads")
    fields.allow_only(raw, "num_key_value_heads", heads)
    return Latent(
        num_heads=heads,
        rank=fields.integer(raw, "kv_lora_rank", 512),
        nope_size=fields.integer(raw, "qk_nope_head_dim", 128),
        rope_size=fields.integer(raw, "qk_rope_head_dim", 64),
        value_size=fields.integer(raw, "v_head_dim", 128),
        query_rank=fields.integer(raw, "q_lora_rank", None),
        rope=None,
        bias=fields.flag(raw, "attention_bias", False),
    )


def delta_net_config(raw: fields.Raw, linear: fields.Raw) -> DeltaNet:
    """Return Kimi Delta Attention. Sizes are in `linear_attn_config`, or else in separate fields."""

    def read_size(inner: str, outer: str, default: int) -> int:
        return fields.integer(linear, inner, fields.integer(raw, outer, default))

    heads, head = (
        read_size("num_heads", "linear_num_heads", 32),
        read_size("head_dim", "linear_head_dim", 128),
    )
    return DeltaNet(
        key_heads=heads,
        value_heads=heads,
        key_size=head,
        value_size=head,
        kernel=read_size("short_conv_kernel_size", "linear_conv_kernel_dim", 4),
        eps=parts.rms_norm_config(raw, 1e-5).eps,
        gate="sigmoid",
        gate_rank=head,
        decay_rank=head,
    )


def layer_types(raw: fields.Raw, linear: fields.Raw) -> list[str]:
    """Return the type of each layer.

    They are stated by `layer_types`, or by layer numbers of each kind, counted from 1. By default every
    fourth but the first has attention.
    """
    count = parts.num_layers(raw)
    kinds = ["full_attention" if i and i % 4 == 0 else "linear_attention" for i in range(count)]
    full, others = linear.get("full_attn_layers"), linear.get("kda_layers")
    if full is not None and others is not None:
        numbers = [*full, *others] if isinstance(full, list) and isinstance(others, list) else []
        if any(type(n) is not int for n in numbers) or sorted(numbers) != list(range(1, count + 1)):
            raise ValueError(
                f"full_attn_layers and kda_layers are {quote(full)} and {quote(others)}, "
                f"expected lists that have each number from 1 to {count} once"
            )
        kinds = ["full_attention" if i + 1 in full else "linear_attention" for i in range(count)]
    return fields.layer_types(raw, kinds, MIXERS)


def ffn_configs(raw: fields.Raw) -> list[Dense | Experts]:
    """Return each layer's feed-forward layer: by `mlp_layer_types`, or else the first `first_k_dense_replace`
    dense."""
    first = fields.non_negative_integer(raw, "first_k_dense_replace", 1)
    return parts.typed_ffn_configs(raw, experts_config(raw), parts.dense_head(raw, first))


def experts_config(raw: fields.Raw) -> Experts:
    """Return the experts. A field with two names is read by its name in the hub's files first."""

    def read_field(read: Any, hub_name: str, saved_name: str, default: Any) -> Any:
        return read(raw, fields.present_name(raw, hub_name, saved_name), default)

    size = fields.integer(raw, "moe_intermediate_size", 1024)
    return Experts(
        count=read_field(fields.expert_count, "num_experts", "num_local_experts", 256),
        active=read_field(fields.integer, "num_experts_per_token", "num_experts_per_tok", 8),
        size=size,
        activation="silu",
        scoring="sigmoid",
        normalised=read_field(fields.flag, "moe_renormalize", "norm_topk_prob", True),
        factor=fields.number(raw, "routed_scaling_factor", 2.446),
        correction=True,
        groups=read_field(fields.integer, "num_expert_group", "n_group", 1),
        active_groups=fields.integer(raw, "topk_group", 1),
        group_score="top2",
        shared=read_field(fields.expert_count, "num_shared_experts", "n_shared_experts", 1) * size,
    )


FAMILY = Family(parse_config, NAMES, parts.MTP_LAYERS, alternative_names=SAVED_FFN_NAMES)

"""Shared parts of DeepSeek-V2, -V3 (arXiv 2405.04434 and 2412.19437) and families derived from them: latent
attention, mixtures of experts, and names of tensors."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...model.config import Dense, Experts, Latent
from . import fields, parts
from .ropes import latent_score_scale, read_rope
from .storage import Stored

ATTENTION = parts.LAYER + "self_attn."
MIXTURE = (
    parts.FFN
    | parts.expert_names("mlp", "gate_proj", "up_proj", "down_proj")
    | parts.gated_ffn_names("ffn.shared", "mlp.shared_experts")
)
CORRECTION = {
    "layers.{}.ffn.correction": Stored(parts.LAYER + "mlp.gate.e_score_correction_bias", "E->E"),
}
LATENT = {
    "layers.{}.attention.q": Stored(ATTENTION + "q_proj.weight", "NH,D->DNH"),
    "layers.{}.attention.q_down": Stored(ATTENTION + "q_a_proj.weight", "Q,D->DQ"),
    "layers.{}.attention.q_down_bias": Stored(ATTENTION + "q_a_proj.bias", "Q->Q"),
    "layers.{}.attention.q_norm": Stored(ATTENTION + "q_a_layernorm.weight", "Q->Q"),
    "layers.{}.attention.q_up": Stored(ATTENTION + "q_b_proj.weight", "NH,Q->QNH"),
    "layers.{}.attention.kv_down": Stored(ATTENTION + "kv_a_proj_with_mqa.weight", "C,D->DC"),
    "layers.{}.attention.kv_down_bias": Stored(ATTENTION + "kv_a_proj_with_mqa.bias", "C->C"),
    "layers.{}.attention.kv_norm": Stored(ATTENTION + "kv_a_layernorm.weight", "R->R"),
    "layers.{}.attention.k_up": Stored(ATTENTION + "kv_b_proj.weight", "N[H],R->RNH"),
    "layers.{}.attention.v_up": Stored(ATTENTION + "kv_b_proj.weight", "N[U],R->RNU"),
    "layers.{}.attention.o": Stored(ATTENTION + "o_proj.weight", "D,NU->NUD"),
    "layers.{}.attention.o_bias": Stored(ATTENTION + "o_proj.bias", "D->D"),
}
NAMES = parts.OUTER_NAMES | parts.NORMS | MIXTURE | LATENT
SIZES = {
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
}
COUNT_FIELDS, SHARED_FIELDS = ("n_routed_experts", "num_local_experts"), ("n_shared_experts",)


def latent_attention_config(
    raw: fields.Raw, length: int, interleaved: bool, sizes: Mapping[str, int | None] = SIZES
) -> Latent:
    """Return latent attention.

    length: default of `max_position_embeddings`.
    sizes: defaults of the sizes of heads and latents.
    """
    heads = fields.integer(raw, "num_attention_heads")
    fields.allow_only(raw, "num_key_value_heads", heads)
    nope_size, rope_size, value_size, rank = (
        fields.integer(raw, name, sizes[name])
        for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    rope = replace(read_rope(raw, rope_size, length=length), interleaved=interleaved)
    return Latent(
        num_heads=heads,
        rank=rank,
        nope_size=nope_size,
        rope_size=rope_size,
        value_size=value_size,
        query_rank=fields.nullable(fields.integer, raw, "q_lora_rank", sizes["q_lora_rank"]),
        rope=rope,
        scale=(nope_size + rope_size) ** -0.5 * latent_score_scale(raw),
        bias=fields.flag(raw, "attention_bias", False),
    )


def ffn_configs(raw: fields.Raw, experts: Experts, dense: int) -> list[Dense | Experts]:
    """Return each layer's feed-forward layer.

    The first `first_k_dense_replace` (or else `dense`) are dense. Then every `moe_layer_freq`-th is a
    mixture.
    """
    first, step = (
        fields.non_negative_integer(raw, "first_k_dense_replace", dense),
        fields.integer(raw, "moe_layer_freq", 1),
    )
    mixed = [i >= first and i % step == 0 for i in range(parts.num_layers(raw))]
    return [experts if is_mixture else parts.dense_ffn_config(raw) for is_mixture in mixed]


def listed_ffn_configs(raw: fields.Raw, experts: Experts, dense: int) -> list[Dense | Experts]:
    """Return each layer's feed-forward layer, by `mlp_layer_types`, or else as `ffn_configs`."""
    default_types = [
        "sparse" if isinstance(ffn, Experts) else "dense" for ffn in ffn_configs(raw, experts, dense)
    ]
    return parts.typed_ffn_configs(raw, experts, default_types)


def corrected_experts_config(raw: fields.Raw, defaults: Mapping[str, Any], **names: Any) -> Experts:
    """Return experts that are chosen as in DeepSeek-V3: by a sigmoid and a correction, in groups."""
    fields.allow_only(raw, "topk_method", "noaux_tc")
    return experts_config(
        raw,
        defaults,
        scoring="sigmoid",
        correction=True,
        group_score="top2",
        normalised=fields.flag(raw, "norm_topk_prob", defaults["norm_topk_prob"]),
        factor=fields.number(raw, "routed_scaling_factor", defaults["routed_scaling_factor"]),
        groups=fields.integer(raw, "n_group", defaults["n_group"]),
        active_groups=fields.integer(raw, "topk_group", defaults["topk_group"]),
        **names,
    )


def experts_config(
    raw: fields.Raw,
    defaults: Mapping[str, Any],
    count_fields: tuple[str, ...] = COUNT_FIELDS,
    shared_fields: tuple[str, ...] = SHARED_FIELDS,
    **kinds: Any,
) -> Experts:
    """Return experts; `defaults` are the family's, None for a required field.

    count_fields, shared_fields: names of the fields of the numbers of experts. The latter may be null.
    """
    size = fields.integer(raw, "moe_intermediate_size", defaults["moe_intermediate_size"])
    name = fields.present_name(raw, *shared_fields)
    shared = fields.nullable(fields.expert_count, raw, name, defaults["n_shared_experts"]) or 0
    name = fields.present_name(raw, *count_fields)
    count = fields.expert_count(raw, name, defaults["n_routed_experts"] or fields.REQUIRED)
    active = defaults["num_experts_per_tok"] or fields.REQUIRED
    return parts.experts_config(raw, count, active, size, shared=shared * size, **kinds)

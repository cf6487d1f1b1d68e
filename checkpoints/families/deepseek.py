"""Shared parts of DeepSeek-V2, -V3 (arXiv 2405.04434 and 2412.19437) and families derived from them: latent
attention, mixtures of experts, and names of tensors."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...model.config import Dense, Experts, Latent
from . import fields, parts
from .ropes import latent_magnitude, rope
from .stored import Stored

ATTENTION = parts.LAYER + "self_attn."
MIXTURE = (
    parts.FFN
    | parts.experts("mlp", "gate_proj", "up_proj", "down_proj")
    | parts.gated("ffn.shared", "mlp.shared_experts")
)
CORRECTION = {
    "layers.{}.ffn.correction": Stored(parts.LAYER + "mlp.gate.e_score_correction_bias", "E->E"),
}
NAMES = (
    parts.OUTSIDE
    | parts.NORMS
    | MIXTURE
    | {
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
)


def latent(raw: fields.Raw, length: int, interleaved: bool) -> Latent:
    """Attention; `length` is the default of `max_position_embeddings`."""
    heads = fields.integer(raw, "num_attention_heads")
    fields.only(raw, "num_key_value_heads", heads)
    nope, turned = fields.integer(raw, "qk_nope_head_dim", 128), fields.integer(raw, "qk_rope_head_dim", 64)
    turn = replace(rope(raw, turned, length=length), interleaved=interleaved)
    return Latent(
        num_heads=heads,
        rank=fields.integer(raw, "kv_lora_rank", 512),
        nope_size=nope,
        rope_size=turned,
        value_size=fields.integer(raw, "v_head_dim", 128),
        query_rank=fields.nullable(fields.integer, raw, "q_lora_rank", 1536),
        rope=turn,
        scale=(nope + turned) ** -0.5 * latent_magnitude(raw),
        bias=fields.flag(raw, "attention_bias", False),
    )


def ffns(raw: fields.Raw, experts: Experts, dense: int) -> list[Dense | Experts]:
    """Each layer's, the first `first_k_dense_replace` (or else `dense`) and those between `moe_layer_freq`
    dense."""
    first, step = fields.count(raw, "first_k_dense_replace", dense), fields.integer(raw, "moe_layer_freq", 1)
    mixed = [i >= first and i % step == 0 for i in range(parts.num_layers(raw))]
    return [experts if here else parts.dense(raw) for here in mixed]


def corrected_experts(raw: fields.Raw, defaults: Mapping[str, Any]) -> Experts:
    """Experts that are chosen as in DeepSeek-V3: by a sigmoid and a correction, in groups."""
    fields.only(raw, "topk_method", "noaux_tc")
    return experts(
        raw,
        defaults,
        scoring="sigmoid",
        correction=True,
        group_score="top2",
        normalised=fields.flag(raw, "norm_topk_prob", defaults["norm_topk_prob"]),
        factor=fields.number(raw, "routed_scaling_factor", defaults["routed_scaling_factor"]),
        groups=fields.integer(raw, "n_group", defaults["n_group"]),
        active_groups=fields.integer(raw, "topk_group", defaults["topk_group"]),
    )


def experts(raw: fields.Raw, defaults: Mapping[str, Any], **kinds: Any) -> Experts:
    """Experts with the family's `defaults` of the fields, None where there is none; `n_shared_experts` may be
    null."""
    size = fields.integer(raw, "moe_intermediate_size", defaults["moe_intermediate_size"])
    shared = fields.nullable(fields.experts, raw, "n_shared_experts", defaults["n_shared_experts"]) or 0
    named = fields.named(raw, "n_routed_experts", "num_local_experts")
    count = fields.experts(raw, named, defaults["n_routed_experts"] or fields.REQUIRED)
    active = defaults["num_experts_per_tok"] or fields.REQUIRED
    return parts.mixture(raw, count, active, size, shared=shared * size, **kinds)

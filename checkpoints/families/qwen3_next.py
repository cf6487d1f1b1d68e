"""Qwen3-Next: Gated DeltaNet (arXiv 2412.06464) on most layers, gated attention on the others, and mixtures
of experts. The layers that predict several tokens ahead are left out."""

from collections.abc import Sequence
from typing import Any

from ...model.config import Dense, Experts, LayerKind, ModelConfig
from ...model.recurrent.kinds import DeltaNet
from . import fields, parts, qwen2_moe, qwen3_moe
from .family import Family
from .storage import Stored

ATTENTION = (
    parts.ATTENTION
    | parts.BIASES
    | parts.QK_NORMS
    | {
        "layers.{}.attention.q": Stored(parts.LAYER + "self_attn.q_proj.weight", "N[H],D->DNH"),
        "layers.{}.attention.gate": Stored(parts.LAYER + "self_attn.q_proj.weight", "N[H],D->DNH"),
        "layers.{}.attention.q_bias": Stored(parts.LAYER + "self_attn.q_proj.bias", "N[H]->NH"),
        "layers.{}.attention.gate_bias": Stored(parts.LAYER + "self_attn.q_proj.bias", "N[H]->NH"),
    }
)
LINEAR = parts.LAYER + "linear_attn."
RECURRENT = {
    "layers.{}.recurrent.q_conv": Stored(LINEAR + "conv1d.weight", "[KH],1,Z->KHZ"),
    "layers.{}.recurrent.k_conv": Stored(LINEAR + "conv1d.weight", "[KH],1,Z->KHZ"),
    "layers.{}.recurrent.v_conv": Stored(LINEAR + "conv1d.weight", "[KGU],1,Z->KGUZ"),
    "layers.{}.recurrent.decay_log": Stored(LINEAR + "A_log", "KG->KG"),
    "layers.{}.recurrent.decay_bias": Stored(LINEAR + "dt_bias", "KG->KG"),
    "layers.{}.recurrent.norm": Stored(LINEAR + "norm.weight", "U->U"),
    "layers.{}.recurrent.o": Stored(LINEAR + "out_proj.weight", "D,KGU->KGUD"),
}
PROJECTIONS = {
    "layers.{}.recurrent.q": Stored(LINEAR + "in_proj_qkvz.weight", "K[H],D->DKH"),
    "layers.{}.recurrent.k": Stored(LINEAR + "in_proj_qkvz.weight", "K[H],D->DKH"),
    "layers.{}.recurrent.v": Stored(LINEAR + "in_proj_qkvz.weight", "K[GU],D->DKGU"),
    "layers.{}.recurrent.gate": Stored(LINEAR + "in_proj_qkvz.weight", "K[GU],D->DKGU"),
    "layers.{}.recurrent.rate": Stored(LINEAR + "in_proj_ba.weight", "K[G],D->DKG"),
    "layers.{}.recurrent.decay": Stored(LINEAR + "in_proj_ba.weight", "K[G],D->DKG"),
}
COMMON_NAMES = parts.OUTER_NAMES | parts.NORMS | ATTENTION | RECURRENT
EXPERTS = parts.expert_names("mlp", "gate_proj", "up_proj", "down_proj")
NAMES = COMMON_NAMES | PROJECTIONS | parts.FFN | EXPERTS | qwen2_moe.SHARED
IGNORED = (r"mtp\..*",)
DEFAULTS = {
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Qwen3NextConfig."""
    shared = fields.integer(raw, "shared_expert_intermediate_size", 512)
    ffns = qwen3_moe.ffn_configs(DEFAULTS | qwen2_moe.drop_nulls(raw))
    return model_config(raw, [qwen2_moe.with_shared_expert(ffn, shared) for ffn in ffns])


def model_config(raw: fields.Raw, ffns: Sequence[Dense | Experts], kv_heads: int = 2) -> ModelConfig:
    """Return a model of linear and full attention layers with these feed-forward layers."""
    norm, size = parts.rms_norm_config(raw, offset=1.0), parts.nullable_head_size(raw, 256)
    bias = fields.flag(raw, "attention_bias", False)
    kinds: dict[str, Any] = {"kv_heads": kv_heads, "qk_norm": norm, "bias": bias, "output_bias": bias}
    attention = parts.partial_rotary_attention_config(raw, size, 32768, 0.25, gated=True, **kinds)
    state = delta_net_config(raw)
    mixers = [state if kind == "linear_attention" else attention for kind in layer_types(raw)]
    layers = [LayerKind(mixer, ffn) for mixer, ffn in zip(mixers, ffns, strict=True)]
    return parts.model_config(raw, layers, max_position=32768, norm=norm)


def delta_net_config(raw: fields.Raw) -> DeltaNet:
    """Return the Gated DeltaNet mixer."""
    fields.allow_only(raw, "hidden_act", "silu")
    keys = fields.integer(raw, "linear_num_key_heads", 16)
    values = fields.integer(raw, "linear_num_value_heads", 32)
    if values % keys:
        raise ValueError(f"linear_num_value_heads {values} is not a multiple of linear_num_key_heads {keys}")
    return DeltaNet(
        key_heads=keys,
        value_heads=values,
        key_size=fields.integer(raw, "linear_key_head_dim", 128),
        value_size=fields.integer(raw, "linear_value_head_dim", 128),
        kernel=fields.integer(raw, "linear_conv_kernel_dim", 4),
        eps=parts.rms_norm_config(raw).eps,
    )


def layer_types(raw: fields.Raw) -> list[str]:
    """Return `layer_types`, or else every `full_attention_interval`-th layer has attention."""
    interval = fields.integer(raw, "full_attention_interval", 4)
    count = parts.num_layers(raw)
    kinds = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(count)]
    return fields.layer_types(raw, kinds, ("full_attention", "linear_attention"))


FAMILY = Family(parse_config, NAMES, IGNORED)

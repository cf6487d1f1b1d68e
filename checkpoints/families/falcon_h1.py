"""Falcon-H1 (Technology Innovation Institute, arXiv 2507.22448): attention and Mamba-2 side by side in each
layer, and factors of almost everything."""

from typing import Any

from ...model.config import Dense, GroupedQuery, LayerKind, ModelConfig
from ...model.recurrent.kinds import Mamba
from . import fields, mamba2, parts
from .family import Family
from .ropes import rope
from .stored import Stored

FFN = {
    path: Stored(stored.name.replace("mlp.", "feed_forward."), stored.axes)
    for path, stored in (parts.FFN | parts.FFN_BIASES).items()
}
NAMES = (
    parts.BACKBONE
    | parts.BIASES
    | FFN
    | mamba2.names(parts.LAYER + "mamba.")
    | {
        "norm.gain": Stored("model.final_layernorm.weight", "D->D"),
        "layers.{}.ffn_norm.gain": Stored(parts.LAYER + "pre_ff_layernorm.weight", "D->D"),
    }
)


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' FalconH1Config."""
    fields.only(raw, "attn_layer_indices")
    fields.only(raw, "mamba_use_mlp", True)
    of_attention = (factor(raw, "attention_in_multiplier"), factor(raw, "attention_out_multiplier"))
    of_mamba = (factor(raw, "ssm_in_multiplier"), factor(raw, "ssm_out_multiplier"))
    layer = LayerKind(attention(raw), ffn(raw), mamba(raw), (of_attention, of_mamba))
    return parts.decoder(
        raw,
        layer,
        max_position=8192,
        norm=parts.rms(raw, 1e-5),
        embedding_scale=factor(raw, "embedding_multiplier"),
        logit_scale=factor(raw, "lm_head_multiplier"),
    )


def factor(raw: fields.Raw, name: str) -> float:
    return fields.number(raw, name, 1.0)


def attention(raw: fields.Raw) -> GroupedQuery:
    """Keys have a factor, and so their scores."""
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    scale = factor(raw, "key_multiplier") * size**-0.5
    turn = rope(raw, size, length=8192)
    return parts.grouped_query(raw, turn, size, kv_heads=8, bias=bias, output_bias=bias, scale=scale)


def ffn(raw: fields.Raw) -> Dense:
    of_gate, of_all = fields.numbers(raw, "mlp_multipliers", 2, [1.0] * 2)
    bias = fields.flag(raw, "mlp_bias", False)
    return parts.dense(raw, bias=bias, gate_scale=of_gate, scale=of_all)


def mamba(raw: fields.Raw) -> Mamba:
    hidden = fields.integer(raw, "hidden_size")
    width = fields.nullable(fields.integer, raw, "mamba_d_ssm", 1024)
    norms = {True: "then gated", False: "of gated"}
    order = norms[fields.flag(raw, "mamba_norm_before_gate", True)]
    kinds: dict[str, Any] = {
        "output_bias": fields.flag(raw, "projectors_bias", False),
        "norm": order if fields.flag(raw, "mamba_rms_norm", False) else None,
        "eps": parts.rms(raw, 1e-5).eps,
        "scales": fields.numbers(raw, "ssm_multipliers", 5, [1.0] * 5),
    }
    expanded = fields.integer(raw, "mamba_expand", 2) * hidden
    return mamba2.beside_attention(raw, width or expanded, **kinds)


FAMILY = Family(config, NAMES, parts.IGNORED)

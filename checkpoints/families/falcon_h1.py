"""Falcon-H1 (Technology Innovation Institute, arXiv 2507.22448): attention and Mamba-2 side by side in each
layer, and factors of almost everything."""

from typing import Any

from ...model.config import Dense, GroupedQuery, LayerKind, ModelConfig
from ...model.recurrent.kinds import Mamba
from . import fields, mamba2, parts
from .family import Family
from .ropes import read_rope
from .storage import Stored

FFN = {
    path: Stored(stored.name.replace("mlp.", "feed_forward."), stored.axes)
    for path, stored in (parts.FFN | parts.FFN_BIASES).items()
}
NAMES = (
    parts.BACKBONE
    | parts.BIASES
    | FFN
    | mamba2.mixer_names(parts.LAYER + "mamba.")
    | {
        "norm.gain": Stored("model.final_layernorm.weight", "D->D"),
        "layers.{}.ffn_norm.gain": Stored(parts.LAYER + "pre_ff_layernorm.weight", "D->D"),
    }
)


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' FalconH1Config."""
    fields.allow_only(raw, "attn_layer_indices")
    fields.allow_only(raw, "mamba_use_mlp", True)
    attention_scales = (
        multiplier(raw, "attention_in_multiplier"),
        multiplier(raw, "attention_out_multiplier"),
    )
    mamba_scales = (multiplier(raw, "ssm_in_multiplier"), multiplier(raw, "ssm_out_multiplier"))
    layer = LayerKind(
        attention_config(raw), ffn_config(raw), mamba_config(raw), (attention_scales, mamba_scales)
    )
    return parts.model_config(
        raw,
        layer,
        max_position=8192,
        norm=parts.rms_norm_config(raw, 1e-5),
        embedding_scale=multiplier(raw, "embedding_multiplier"),
        logit_scale=multiplier(raw, "lm_head_multiplier"),
    )


def multiplier(raw: fields.Raw, name: str) -> float:
    """Return a factor, by default 1."""
    return fields.number(raw, name, 1.0)


def attention_config(raw: fields.Raw) -> GroupedQuery:
    """Return attention. The factor of the keys is part of the scale of scores."""
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    scale = multiplier(raw, "key_multiplier") * size**-0.5
    rope = read_rope(raw, size, length=8192)
    return parts.grouped_query_config(raw, rope, size, kv_heads=8, bias=bias, output_bias=bias, scale=scale)


def ffn_config(raw: fields.Raw) -> Dense:
    """Return the feed-forward layer, with the factors of its gate and its output."""
    gate_scale, ffn_scale = fields.numbers(raw, "mlp_multipliers", 2, [1.0] * 2)
    bias = fields.flag(raw, "mlp_bias", False)
    return parts.dense_ffn_config(raw, bias=bias, gate_scale=gate_scale, scale=ffn_scale)


def mamba_config(raw: fields.Raw) -> Mamba:
    """Return the Mamba-2 mixer."""
    hidden = fields.integer(raw, "hidden_size")
    width = fields.nullable(fields.integer, raw, "mamba_d_ssm", 1024)
    norms = {True: "then gated", False: "of gated"}
    order = norms[fields.flag(raw, "mamba_norm_before_gate", True)]
    kinds: dict[str, Any] = {
        "output_bias": fields.flag(raw, "projectors_bias", False),
        "norm": order if fields.flag(raw, "mamba_rms_norm", False) else None,
        "eps": parts.rms_norm_config(raw, 1e-5).eps,
        "scales": fields.numbers(raw, "ssm_multipliers", 5, [1.0] * 5),
    }
    expanded = fields.integer(raw, "mamba_expand", 2) * hidden
    return mamba2.hybrid_mixer_config(raw, width or expanded, **kinds)


FAMILY = Family(parse_config, NAMES)

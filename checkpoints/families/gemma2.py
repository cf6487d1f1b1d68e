"""Gemma 2 (arXiv 2408.00118): norms before and after, a window on every second layer, capped scores and
logits."""

from ...model.config import LayerKind, ModelConfig
from ...model.rope import Rope
from . import fields, parts
from .family import Family
from .ropes import read_rope
from .storage import Stored

INPUT_NORMS = {
    "layers.{}.attention_norm.gain": Stored(parts.LAYER + "input_layernorm.weight", "D->D"),
    "layers.{}.ffn_norm.gain": Stored(parts.LAYER + "pre_feedforward_layernorm.weight", "D->D"),
}
NAMES = parts.OUTER_NAMES | INPUT_NORMS | parts.OUTPUT_NORMS | parts.ATTENTION | parts.FFN | parts.BIASES


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Gemma2Config."""
    rope = read_rope(raw, fields.head_size(raw, 256), length=8192)
    window = fields.nullable(fields.integer, raw, "sliding_window", 4096)
    caps = (50.0, 30.0)
    layers = [
        layer_config(raw, rope, w, caps[0]) for w in parts.windows(raw, parts.sliding_pattern(raw, 2), window)
    ]
    return model_config(raw, layers, 8192, caps[1])


def layer_config(raw: fields.Raw, rope: Rope, window: int | None, cap: float | None, **kinds) -> LayerKind:
    """Return a layer of Gemma 2 or 3; `cap` is the default of `attn_logit_softcapping`."""
    fields.allow_only(raw, "use_bidirectional_attention", False)
    bias = fields.flag(raw, "attention_bias", False)
    attention = parts.grouped_query_config(
        raw,
        rope,
        fields.head_size(raw, 256),
        kv_heads=4,
        window=window,
        scale=fields.number(raw, "query_pre_attn_scalar", 256.0) ** -0.5,
        softcap=fields.nullable(fields.number, raw, "attn_logit_softcapping", cap),
        bias=bias,
        output_bias=bias,
        **kinds,
    )
    activation = fields.activation(raw, "hidden_activation", "gelu_pytorch_tanh")
    return LayerKind(attention, parts.dense_ffn_config(raw, activation))


def model_config(
    raw: fields.Raw, layers: list[LayerKind], max_position: int, cap: float | None
) -> ModelConfig:
    """Return a model of Gemma's layers; `cap` is the default of `final_logit_softcapping`."""
    return parts.model_config(
        raw,
        layers,
        max_position,
        norm=parts.rms_norm_config(raw, offset=1.0),
        tied=True,
        post_norms=True,
        embedding_scale=fields.integer(raw, "hidden_size") ** 0.5,
        logit_softcap=fields.nullable(fields.number, raw, "final_logit_softcapping", cap),
    )


FAMILY = Family(parse_config, NAMES)

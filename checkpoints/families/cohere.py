"""Command R and Aya 23 (Cohere, 2024; Aryabumi et al., arXiv 2405.15032): attention and feed-forward layer
read one layer norm without a bias. Neighbouring dimensions are rotated, and logits are scaled. Command R+
norms each head, with a gain for each."""

from dataclasses import replace
from typing import Any

from ...model.config import GroupedQuery, LayerKind, ModelConfig, NormKind
from ...model.rope import Rope
from . import fields, parts
from .family import Family
from .ropes import read_rope
from .storage import Stored

LENGTH = 8192
NAMES = (
    parts.OUTER_NAMES
    | {"layers.{}.attention_norm.gain": Stored(parts.LAYER + "input_layernorm.weight", "D->D")}
    | parts.ATTENTION
    | parts.BIASES
    | parts.FFN
)
HEAD_NORMS = {
    "layers.{}.attention.q_norm": Stored(parts.LAYER + "self_attn.q_norm.weight", "N,H->NH"),
    "layers.{}.attention.k_norm": Stored(parts.LAYER + "self_attn.k_norm.weight", "K,H->KH"),
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' CohereConfig."""
    head_norm = norm_config(raw) if fields.flag(raw, "use_qk_norm", False) else None
    mixer = attention_config(
        raw, interleaved_rope(raw, 500000.0), qk_norm=head_norm, qk_norm_over="each head"
    )
    return model_config(raw, LayerKind(mixer, parts.dense_ffn_config(raw)))


def interleaved_rope(raw: fields.Raw, theta: float) -> Rope:
    """Return the rope with neighbouring pairs; `theta` is the default of `rope_theta`."""
    return replace(read_rope(raw, fields.head_size(raw), length=LENGTH, theta=theta), interleaved=True)


def attention_config(raw: fields.Raw, rope: Rope | None, **kinds: Any) -> GroupedQuery:
    """Return attention whose biases are all there, or none."""
    bias = fields.flag(raw, "attention_bias", False)
    return parts.grouped_query_config(raw, rope, fields.head_size(raw), bias=bias, output_bias=bias, **kinds)


def norm_config(raw: fields.Raw) -> NormKind:
    """Return a layer norm without a bias."""
    return parts.layer_norm_config(raw, "layer_norm_eps", bias=False)


def model_config(
    raw: fields.Raw, layers: list[LayerKind] | LayerKind, norm: NormKind | None = None
) -> ModelConfig:
    """Return a model of these layers; without a `norm` it is a layer norm.

    Command R states its longest context in `model_max_length`, not in `max_position_embeddings`.
    """
    scale = fields.number(raw, "logit_scale", 0.0625)
    model = parts.model_config(
        raw, layers, LENGTH, norm or norm_config(raw), tied=True, parallel="one norm", logit_scale=scale
    )
    return replace(model, max_position=fields.integer(raw, "model_max_length", model.max_position))


FAMILY = Family(parse_config, NAMES | HEAD_NORMS)

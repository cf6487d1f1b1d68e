"""Command R and Aya 23 (Cohere, 2024; Aryabumi et al., arXiv 2405.15032): both parts of a layer read one
layer norm without a bias, neighbours are turned, logits are scaled; Command R+ norms heads with gains of
their own."""

from dataclasses import replace
from typing import Any

from ...model.config import GroupedQuery, LayerKind, ModelConfig, NormKind
from ...model.rope import Rope
from . import fields, parts
from .family import Family
from .ropes import rope
from .stored import Stored

LENGTH = 8192
NAMES = (
    parts.OUTSIDE
    | {"layers.{}.attention_norm.gain": Stored(parts.LAYER + "input_layernorm.weight", "D->D")}
    | parts.ATTENTION
    | parts.BIASES
    | parts.FFN
)
HEAD_NORMS = {
    "layers.{}.attention.q_norm": Stored(parts.LAYER + "self_attn.q_norm.weight", "N,H->NH"),
    "layers.{}.attention.k_norm": Stored(parts.LAYER + "self_attn.k_norm.weight", "K,H->KH"),
}


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' CohereConfig."""
    normed = norm(raw) if fields.flag(raw, "use_qk_norm", False) else None
    mixer = attention(raw, turn(raw, 500000.0), qk_norm=normed, qk_norm_over="each head")
    return decoder(raw, LayerKind(mixer, parts.dense(raw)))


def turn(raw: fields.Raw, theta: float) -> Rope:
    """The rope; `theta` is the default of `rope_theta`."""
    return replace(rope(raw, fields.head_size(raw), length=LENGTH, theta=theta), interleaved=True)


def attention(raw: fields.Raw, rope: Rope | None, **kinds: Any) -> GroupedQuery:
    bias = fields.flag(raw, "attention_bias", False)
    return parts.grouped_query(raw, rope, fields.head_size(raw), bias=bias, output_bias=bias, **kinds)


def norm(raw: fields.Raw) -> NormKind:
    return parts.layer_norm(raw, "layer_norm_eps", bias=False)


def decoder(raw: fields.Raw, layers: list[LayerKind] | LayerKind) -> ModelConfig:
    """A model of such layers; Command R's contexts are those of `model_max_length`, not of
    `max_position_embeddings`."""
    scale = fields.number(raw, "logit_scale", 0.0625)
    found = parts.decoder(raw, layers, LENGTH, norm(raw), tied=True, parallel="one norm", logit_scale=scale)
    return replace(found, max_position=fields.integer(raw, "model_max_length", found.max_position))


FAMILY = Family(config, NAMES | HEAD_NORMS, parts.IGNORED)

"""LFM2 (Liquid AI, arXiv 2511.23404): gated short convolutions on most layers, attention on the others."""

import math
from collections.abc import Sequence

from ...model.config import Dense, Experts, LayerKind, ModelConfig
from ...model.recurrent.kinds import ShortConv
from . import fields, parts
from .family import Family
from .ropes import read_rope
from .storage import Stored

ATTENTION, CONV = parts.LAYER + "self_attn.", parts.LAYER + "conv."
PROJECTIONS = ("before", "after", "v")  # in the order in which one tensor joins them
COMMON_NAMES = (
    parts.OUTER_NAMES
    | parts.ATTENTION
    | {
        "norm.gain": Stored("model.embedding_norm.weight", "D->D"),
        "layers.{}.attention_norm.gain": Stored(parts.LAYER + "operator_norm.weight", "D->D"),
        "layers.{}.ffn_norm.gain": Stored(parts.LAYER + "ffn_norm.weight", "D->D"),
        "layers.{}.attention.o": Stored(ATTENTION + "out_proj.weight", "D,NH->NHD"),
        "layers.{}.attention.q_norm": Stored(ATTENTION + "q_layernorm.weight", "H->H"),
        "layers.{}.attention.k_norm": Stored(ATTENTION + "k_layernorm.weight", "H->H"),
        "layers.{}.recurrent.conv": Stored(CONV + "conv.weight", "KH,1,Z->KHZ"),
        "layers.{}.recurrent.conv_bias": Stored(CONV + "conv.bias", "KH->KH"),
        "layers.{}.recurrent.o": Stored(CONV + "out_proj.weight", "D,KH->KHD"),
        "layers.{}.recurrent.o_bias": Stored(CONV + "out_proj.bias", "D->D"),
        "layers.{}.ffn.gate": Stored(parts.LAYER + "feed_forward.w1.weight", "F,D->DF"),
        "layers.{}.ffn.up": Stored(parts.LAYER + "feed_forward.w3.weight", "F,D->DF"),
        "layers.{}.ffn.down": Stored(parts.LAYER + "feed_forward.w2.weight", "D,F->FD"),
    }
    | {f"layers.{{}}.recurrent.{x}": Stored(CONV + "in_proj.weight", "[KH],D->DKH") for x in PROJECTIONS}
    | {f"layers.{{}}.recurrent.{x}_bias": Stored(CONV + "in_proj.bias", "[KH]->KH") for x in PROJECTIONS}
)
FIXED_FIELDS = {"block_use_swiglu": True, "use_pos_enc": True}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Lfm2Config."""
    count = parts.num_layers(raw)
    full = fields.layer_indices(raw, "full_attn_idxs", range(count))
    kinds = ["full_attention" if i in full else "conv" for i in range(count)]
    return model_config(raw, kinds, [Dense(ffn_size(raw))] * count)


def model_config(raw: fields.Raw, kinds: list[str], ffns: Sequence[Dense | Experts]) -> ModelConfig:
    """Return a model of both kinds of layers; `kinds` are the default of `layer_types`."""
    for name, value in FIXED_FIELDS.items():
        fields.allow_only(raw, name, value)
    hidden, heads = fields.integer(raw, "hidden_size"), fields.integer(raw, "num_attention_heads")
    norm, size = parts.NormKind(eps=fields.number(raw, "norm_eps", 1e-5)), fields.head_size(raw)
    rope = read_rope(raw, size, length=128000, theta=1e6)
    attention = parts.grouped_query_config(raw, rope, size, kv_heads=8, qk_norm=norm)
    split = math.gcd(hidden, heads)
    bias = fields.flag(raw, "conv_bias", False)
    conv = ShortConv(split, hidden // split, fields.integer(raw, "conv_L_cache", 3), bias)
    types = fields.layer_types(raw, kinds, ("full_attention", "conv"))
    mixers = [conv if kind == "conv" else attention for kind in types]
    layers = [LayerKind(mixer, ffn) for mixer, ffn in zip(mixers, ffns, strict=True)]
    tied = {"tie_word_embeddings": raw.get(fields.present_name(raw, "tie_embedding", "tie_word_embeddings"))}
    return parts.model_config({**raw, **tied}, layers, max_position=128000, norm=norm, tied=True)


def ffn_size(raw: fields.Raw) -> int:
    """Return the number of inner dimensions: two thirds of the field's, rounded up to a multiple.

    If `block_auto_adjust_ff_dim` is false it is the field's.
    """
    size = fields.integer(raw, fields.present_name(raw, "block_ff_dim", "intermediate_size"))
    if not fields.flag(raw, "block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    factor = fields.nullable(fields.number, raw, "block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return size
    multiple = fields.integer(raw, "block_multiple_of", 256)
    return -(-int(factor * size) // multiple) * multiple


FAMILY = Family(parse_config, COMMON_NAMES)

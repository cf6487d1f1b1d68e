"""Falcon (Almazrouei et al., arXiv 2311.16867): attention and a plain feed-forward layer read one layer norm,
or one each (40B and 180B). Each key head's queries are stored before its key and value."""

from typing import Literal

from ...model.config import Dense, LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import read_rope
from .storage import Stored

LAYER = "transformer.h.{}."
QKV = LAYER + "self_attention.query_key_value."
NAMES = {
    "embed": Stored("transformer.word_embeddings.weight", "V,D->VD"),
    "layers.{}.attention_norm.gain": Stored(LAYER + "input_layernorm.weight", "D->D"),
    "layers.{}.attention_norm.bias": Stored(LAYER + "input_layernorm.bias", "D->D"),
    "layers.{}.attention.q": Stored(QKV + "weight", "K[NH],D->DNH"),
    "layers.{}.attention.k": Stored(QKV + "weight", "K[H],D->DKH"),
    "layers.{}.attention.v": Stored(QKV + "weight", "K[H],D->DKH"),
    "layers.{}.attention.q_bias": Stored(QKV + "bias", "K[NH]->NH"),
    "layers.{}.attention.k_bias": Stored(QKV + "bias", "K[H]->KH"),
    "layers.{}.attention.v_bias": Stored(QKV + "bias", "K[H]->KH"),
    "layers.{}.attention.o": Stored(LAYER + "self_attention.dense.weight", "D,NH->NHD"),
    "layers.{}.attention.o_bias": Stored(LAYER + "self_attention.dense.bias", "D->D"),
    "layers.{}.ffn_norm.gain": Stored(LAYER + "post_attention_layernorm.weight", "D->D"),
    "layers.{}.ffn_norm.bias": Stored(LAYER + "post_attention_layernorm.bias", "D->D"),
    "norm.gain": Stored("transformer.ln_f.weight", "D->D"),
    "norm.bias": Stored("transformer.ln_f.bias", "D->D"),
    "head": Stored("lm_head.weight", "V,D->VD"),
} | parts.plain_ffn_names("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", LAYER)
# names of models with two norms in a parallel layer
PARALLEL_NORMS = {
    "layers.{}.attention_norm.gain": Stored(LAYER + "ln_attn.weight", "D->D"),
    "layers.{}.attention_norm.bias": Stored(LAYER + "ln_attn.bias", "D->D"),
    "layers.{}.ffn_norm.gain": Stored(LAYER + "ln_mlp.weight", "D->D"),
    "layers.{}.ffn_norm.bias": Stored(LAYER + "ln_mlp.bias", "D->D"),
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' FalconConfig."""
    fields.allow_only(raw, "alibi", False)
    hidden = fields.integer(raw, fields.present_name(raw, "n_embed", "hidden_size"))
    raw = {**raw, "hidden_size": hidden, "num_key_value_heads": num_kv_heads(raw)}
    size, bias = fields.divided_head_size(raw), fields.flag(raw, "bias", False)
    rope = read_rope(raw, size, length=2048)
    inner_size = fields.integer(raw, "ffn_hidden_size", 4 * hidden)
    activation = fields.activation(raw, "activation", "gelu")
    return parts.model_config(
        raw,
        LayerKind(
            parts.grouped_query_config(raw, rope, size, bias=bias, output_bias=bias),
            Dense(inner_size, activation, gated=False, bias=bias),
        ),
        max_position=2048,
        norm=parts.layer_norm_config(raw, "layer_norm_epsilon"),
        tied=True,
        parallel=parallel_kind(raw),
    )


def num_kv_heads(raw: fields.Raw) -> int:
    """Return the number of key heads."""
    heads = fields.integer(raw, "num_attention_heads")
    if fields.flag(raw, "new_decoder_architecture", False):
        return fields.integer(raw, "num_kv_heads", heads)
    if fields.flag(raw, "multi_query", True):
        return 1
    fields.allow_only(raw, "num_kv_heads", heads)
    return heads


def parallel_kind(raw: fields.Raw) -> Literal["one norm", "two norms"] | None:
    """Return what attention and feed-forward layer read: the same, or the latter attention's output."""
    if fields.flag(raw, "new_decoder_architecture", False):
        fields.allow_only(raw, "parallel_attn", True)
        fields.allow_only(raw, "num_ln_in_parallel_attn", 1, 2)
        return "two norms" if fields.integer(raw, "num_ln_in_parallel_attn", 2) == 2 else "one norm"
    fields.allow_only(raw, "num_ln_in_parallel_attn", 1)
    return "one norm" if fields.flag(raw, "parallel_attn", True) else None


FAMILY = Family(parse_config, NAMES, alternative_names=PARALLEL_NORMS)

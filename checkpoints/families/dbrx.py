"""DBRX (Databricks, 2024): a mixture of experts with layer norms without biases, whose queries, keys and
values are clipped.

DBRX's own files state the rope's base in `attn_config`. Transformers 5 does not read it there, and takes
10000.
"""

from ...model.config import Experts, LayerKind, ModelConfig, NormKind
from . import fields, parts
from .family import Family
from .ropes import read_rope
from .storage import Stored

LAYER = "transformer.blocks.{}."
ATTENTION = LAYER + "norm_attn_norm.attn."
EXPERTS = LAYER + "ffn.experts.mlp."
NAMES = {
    "embed": Stored("transformer.wte.weight", "V,D->VD"),
    "layers.{}.attention_norm.gain": Stored(LAYER + "norm_attn_norm.norm_1.weight", "D->D"),
    "layers.{}.attention.q": Stored(ATTENTION + "Wqkv.weight", "[NH],D->DNH"),
    "layers.{}.attention.k": Stored(ATTENTION + "Wqkv.weight", "[KH],D->DKH"),
    "layers.{}.attention.v": Stored(ATTENTION + "Wqkv.weight", "[KH],D->DKH"),
    "layers.{}.attention.o": Stored(ATTENTION + "out_proj.weight", "D,NH->NHD"),
    "layers.{}.ffn_norm.gain": Stored(LAYER + "norm_attn_norm.norm_2.weight", "D->D"),
    "layers.{}.ffn.router": Stored(LAYER + "ffn.router.layer.weight", "E,D->DE"),
    "layers.{}.ffn.experts.gate": Stored(EXPERTS + "w1", "E[F],D->EDF"),
    "layers.{}.ffn.experts.up": Stored(EXPERTS + "v1", "E[F],D->EDF"),
    "layers.{}.ffn.experts.down": Stored(EXPERTS + "w2", "E[F],D->EFD"),
    "norm.gain": Stored("transformer.norm_f.weight", "D->D"),
    "head": Stored("lm_head.weight", "V,D->VD"),
}
SIZES = {
    "hidden_size": ("d_model", 2048),
    "num_attention_heads": ("n_heads", 16),
    "num_hidden_layers": ("n_layers", 24),
    "max_position_embeddings": ("max_seq_len", 2048),
    "vocab_size": ("vocab_size", 32000),
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' DbrxConfig."""
    fields.allow_only(raw, "tie_word_embeddings", False)
    inner = fields.section(raw, "attn_config")
    kv_heads = fields.integer(inner, "kv_n_heads", 1)
    raw = {**fields.with_common_names(raw, SIZES), "num_key_value_heads": kv_heads}
    size, clip = fields.divided_head_size(raw), fields.number(inner, "clip_qkv", None)
    rope = read_rope(raw, size, length=2048, theta=fields.number(inner, "rope_theta", 10000.0))
    attention = parts.grouped_query_config(raw, rope, size, clip=clip)
    layer = LayerKind(attention, experts_config(fields.section(raw, "ffn_config")))
    return parts.model_config(raw, layer, 2048, NormKind("layer"))


def experts_config(inner: fields.Raw) -> Experts:
    """Return the experts by the fields of `ffn_config`."""
    fields.allow_only(inner, "moe_normalize_expert_weights", 1)
    is_normalised = fields.nullable(fields.number, inner, "moe_normalize_expert_weights", 1.0) is not None
    return Experts(
        fields.expert_count(inner, "moe_num_experts", 4),
        fields.integer(inner, "moe_top_k", 1),
        fields.integer(inner, "ffn_hidden_size", 3584),
        fields.activation(fields.section(inner, "ffn_act_fn"), "name", "silu"),
        normalised=is_normalised,
    )


FAMILY = Family(parse_config, NAMES)

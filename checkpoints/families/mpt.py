"""MPT (MosaicML, 2023): ALiBi in place of positions, layer norms without biases, plain feed-forward layers.

Transformers reads neither `alibi` and `alibi_bias_max` nor `expansion_ratio`, `no_bias` and `logit_scale`:
other values than its own are refused.
"""

from ...model.config import Dense, GroupedQuery, LayerKind, ModelConfig
from . import dbrx, fields, parts
from .family import Family
from .storage import Stored

LAYER = "transformer.blocks.{}."
NAMES = {
    "embed": Stored("transformer.wte.weight", "V,D->VD"),
    "layers.{}.attention_norm.gain": Stored(LAYER + "norm_1.weight", "D->D"),
    "layers.{}.attention.q": Stored(LAYER + "attn.Wqkv.weight", "[NH],D->DNH"),
    "layers.{}.attention.k": Stored(LAYER + "attn.Wqkv.weight", "[KH],D->DKH"),
    "layers.{}.attention.v": Stored(LAYER + "attn.Wqkv.weight", "[KH],D->DKH"),
    "layers.{}.attention.o": Stored(LAYER + "attn.out_proj.weight", "D,NH->NHD"),
    "layers.{}.ffn_norm.gain": Stored(LAYER + "norm_2.weight", "D->D"),
    "layers.{}.ffn.up": Stored(LAYER + "ffn.up_proj.weight", "F,D->DF"),
    "layers.{}.ffn.down": Stored(LAYER + "ffn.down_proj.weight", "D,F->FD"),
    "norm.gain": Stored("transformer.norm_f.weight", "D->D"),
    "head": Stored("lm_head.weight", "V,D->VD"),
}
SIZES = dbrx.SIZES | {"vocab_size": ("vocab_size", 50368)}
FIXED_FIELDS = {"expansion_ratio": 4, "no_bias": True}
FIXED_INNER_FIELDS = {
    "attn_type": "multihead_attention",
    "prefix_lm": False,
    "qk_ln": False,
    "alibi": True,
    "alibi_bias_max": 8,
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' MptConfig."""
    inner = fields.section(raw, "attn_config")
    for section, fixed in ((raw, FIXED_FIELDS), (inner, FIXED_INNER_FIELDS)):
        for name, value in fixed.items():
            fields.allow_only(section, name, value)
    fields.allow_only(raw, "logit_scale")
    fields.allow_only(raw, "norm_type", "low_precision_layernorm", "layernorm")
    raw = fields.with_common_names(raw, SIZES)
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    attention = GroupedQuery(
        heads,
        heads,
        fields.divided_head_size(raw),
        rope=None,
        alibi=8.0,
        scale=fields.number(inner, "softmax_scale", None),
        clip=fields.number(inner, "clip_qkv", None),
    )
    norm = parts.layer_norm_config(raw, "layer_norm_epsilon", bias=False)
    layer = LayerKind(attention, Dense(4 * hidden, "gelu", gated=False))
    return parts.model_config(raw, layer, 2048, norm, tied=True)


FAMILY = Family(parse_config, NAMES)

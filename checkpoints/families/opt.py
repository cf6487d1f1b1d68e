"""OPT and Galactica (Zhang et al., arXiv 2205.01068; Taylor et al., arXiv 2211.09085): GPT-2 with separate
projections, whose learned positions begin at the third row."""

from ...model.config import Dense, GroupedQuery, LayerKind, ModelConfig, NormKind
from . import fields, parts
from .family import Family
from .storage import Stored

DECODER = "model.decoder."
LAYER = DECODER + "layers.{}."
NAMES = {
    "embed": Stored(DECODER + "embed_tokens.weight", "V,D->VD"),
    "positions": Stored(DECODER + "embed_positions.weight", "S,D->SD"),
    "layers.{}.attention_norm.gain": Stored(LAYER + "self_attn_layer_norm.weight", "D->D"),
    "layers.{}.attention_norm.bias": Stored(LAYER + "self_attn_layer_norm.bias", "D->D"),
    "layers.{}.attention.q": Stored(LAYER + "self_attn.q_proj.weight", "NH,D->DNH"),
    "layers.{}.attention.k": Stored(LAYER + "self_attn.k_proj.weight", "KH,D->DKH"),
    "layers.{}.attention.v": Stored(LAYER + "self_attn.v_proj.weight", "KH,D->DKH"),
    "layers.{}.attention.q_bias": Stored(LAYER + "self_attn.q_proj.bias", "NH->NH"),
    "layers.{}.attention.k_bias": Stored(LAYER + "self_attn.k_proj.bias", "KH->KH"),
    "layers.{}.attention.v_bias": Stored(LAYER + "self_attn.v_proj.bias", "KH->KH"),
    "layers.{}.attention.o": Stored(LAYER + "self_attn.out_proj.weight", "D,NH->NHD"),
    "layers.{}.attention.o_bias": Stored(LAYER + "self_attn.out_proj.bias", "D->D"),
    "layers.{}.ffn_norm.gain": Stored(LAYER + "final_layer_norm.weight", "D->D"),
    "layers.{}.ffn_norm.bias": Stored(LAYER + "final_layer_norm.bias", "D->D"),
    "norm.gain": Stored(DECODER + "final_layer_norm.weight", "D->D"),
    "norm.bias": Stored(DECODER + "final_layer_norm.bias", "D->D"),
    "head": Stored("lm_head.weight", "V,D->VD"),
} | parts.plain_ffn_names("fc1", "fc2", LAYER)
POSITION_OFFSET = 2


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' OPTConfig."""
    fields.allow_only(raw, "do_layer_norm_before", True)
    fields.allow_only(raw, "_remove_final_layer_norm", False)
    fields.allow_only(raw, "word_embed_proj_dim", fields.integer(raw, "hidden_size"))
    size, heads = fields.divided_head_size(raw), fields.integer(raw, "num_attention_heads")
    bias = fields.flag(raw, "enable_bias", True)
    attention = GroupedQuery(heads, heads, size, rope=None, bias=bias, output_bias=bias)
    activation = fields.activation(raw, "activation_function", "relu")
    ffn = Dense(fields.integer(raw, "ffn_dim", 3072), activation, gated=False, bias=bias)
    is_affine = fields.flag(raw, "layer_norm_elementwise_affine", True)
    return parts.model_config(
        raw,
        LayerKind(attention, ffn),
        max_position=2048,
        norm=NormKind("layer", bias=is_affine, gain=is_affine),
        tied=True,
        learned_positions=True,
        position_offset=POSITION_OFFSET,
    )


FAMILY = Family(parse_config, NAMES)

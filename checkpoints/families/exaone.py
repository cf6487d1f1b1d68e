"""EXAONE 3.0 and 3.5 (LG AI Research, arXiv 2408.03541 and 2412.04862): Llama with other names of fields and
tensors."""

from ...model.config import LayerKind, ModelConfig, NormKind
from . import fields, parts
from .family import Family
from .ropes import read_rope
from .storage import Stored

LAYER = "transformer.h.{}."
NAMES = {
    "embed": Stored("transformer.wte.weight", "V,D->VD"),
    "norm.gain": Stored("transformer.ln_f.weight", "D->D"),
    "head": Stored("lm_head.weight", "V,D->VD"),
    "layers.{}.attention_norm.gain": Stored(LAYER + "ln_1.weight", "D->D"),
    "layers.{}.ffn_norm.gain": Stored(LAYER + "ln_2.weight", "D->D"),
    "layers.{}.attention.q": Stored(LAYER + "attn.attention.q_proj.weight", "NH,D->DNH"),
    "layers.{}.attention.k": Stored(LAYER + "attn.attention.k_proj.weight", "KH,D->DKH"),
    "layers.{}.attention.v": Stored(LAYER + "attn.attention.v_proj.weight", "KH,D->DKH"),
    "layers.{}.attention.q_bias": Stored(LAYER + "attn.attention.q_proj.bias", "NH->NH"),
    "layers.{}.attention.k_bias": Stored(LAYER + "attn.attention.k_proj.bias", "KH->KH"),
    "layers.{}.attention.v_bias": Stored(LAYER + "attn.attention.v_proj.bias", "KH->KH"),
    "layers.{}.attention.o": Stored(LAYER + "attn.attention.out_proj.weight", "D,NH->NHD"),
    "layers.{}.attention.o_bias": Stored(LAYER + "attn.attention.out_proj.bias", "D->D"),
    "layers.{}.ffn.gate": Stored(LAYER + "mlp.c_fc_0.weight", "F,D->DF"),
    "layers.{}.ffn.gate_bias": Stored(LAYER + "mlp.c_fc_0.bias", "F->F"),
    "layers.{}.ffn.up": Stored(LAYER + "mlp.c_fc_1.weight", "F,D->DF"),
    "layers.{}.ffn.up_bias": Stored(LAYER + "mlp.c_fc_1.bias", "F->F"),
    "layers.{}.ffn.down": Stored(LAYER + "mlp.c_proj.weight", "D,F->FD"),
    "layers.{}.ffn.down_bias": Stored(LAYER + "mlp.c_proj.bias", "D->D"),
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' ExaoneConfig."""
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    rope = read_rope(raw, size, length=4096, theta=500000.0)
    attention = parts.grouped_query_config(raw, rope, size, kv_heads=8, bias=bias, output_bias=bias)
    activation = fields.activation(raw, fields.present_name(raw, "activation_function", "hidden_act"), "silu")
    ffn = parts.dense_ffn_config(raw, activation, bias=fields.flag(raw, "mlp_bias", False))
    eps = fields.number(raw, fields.present_name(raw, "layer_norm_epsilon", "rms_norm_eps"), 1e-5)
    count = fields.layer_count(raw, fields.present_name(raw, "num_layers", "num_hidden_layers"))
    return parts.model_config(raw, [LayerKind(attention, ffn)] * count, 4096, NormKind(eps=eps))


FAMILY = Family(parse_config, NAMES)

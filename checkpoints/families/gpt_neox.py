"""GPT-NeoX and Pythia (Black et al., arXiv 2204.06745; Biderman et al., arXiv 2304.01373): layer norms,
biases, plain feed-forward layers beside attention, projections joined head by head."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .storage import Stored

LAYER = "gpt_neox.layers.{}."
QKV = LAYER + "attention.query_key_value."
NAMES = {
    "embed": Stored("gpt_neox.embed_in.weight", "V,D->VD"),
    "layers.{}.attention_norm.gain": Stored(LAYER + "input_layernorm.weight", "D->D"),
    "layers.{}.attention_norm.bias": Stored(LAYER + "input_layernorm.bias", "D->D"),
    "layers.{}.attention.q": Stored(QKV + "weight", "N[H],D->DNH"),
    "layers.{}.attention.k": Stored(QKV + "weight", "N[H],D->DNH"),
    "layers.{}.attention.v": Stored(QKV + "weight", "N[H],D->DNH"),
    "layers.{}.attention.q_bias": Stored(QKV + "bias", "N[H]->NH"),
    "layers.{}.attention.k_bias": Stored(QKV + "bias", "N[H]->NH"),
    "layers.{}.attention.v_bias": Stored(QKV + "bias", "N[H]->NH"),
    "layers.{}.attention.o": Stored(LAYER + "attention.dense.weight", "D,NH->NHD"),
    "layers.{}.attention.o_bias": Stored(LAYER + "attention.dense.bias", "D->D"),
    "layers.{}.ffn_norm.gain": Stored(LAYER + "post_attention_layernorm.weight", "D->D"),
    "layers.{}.ffn_norm.bias": Stored(LAYER + "post_attention_layernorm.bias", "D->D"),
    "norm.gain": Stored("gpt_neox.final_layer_norm.weight", "D->D"),
    "norm.bias": Stored("gpt_neox.final_layer_norm.bias", "D->D"),
    "head": Stored("embed_out.weight", "V,D->VD"),
} | parts.plain_ffn_names("mlp.dense_h_to_4h", "mlp.dense_4h_to_h", LAYER)
MASKS = r"gpt_neox\.layers\.\d+\.attention\.(masked_)?bias"


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' GPTNeoXConfig."""
    fields.allow_only(raw, "num_key_value_heads", fields.integer(raw, "num_attention_heads"))
    size, bias = fields.divided_head_size(raw), fields.flag(raw, "attention_bias", True)
    attention = parts.partial_rotary_attention_config(
        with_rope_fields(raw), size, length=2048, share=0.25, bias=bias, output_bias=bias
    )
    activation = fields.activation(raw, "hidden_act", "gelu")
    return parts.model_config(
        raw,
        LayerKind(attention, parts.dense_ffn_config(raw, activation, gated=False, bias=True)),
        max_position=2048,
        norm=parts.layer_norm_config(raw, "layer_norm_eps"),
        parallel="two norms" if fields.flag(raw, "use_parallel_residual", True) else None,
    )


def with_rope_fields(raw: fields.Raw) -> fields.Raw:
    """Return the fields with the rope under the names of other families."""
    theta = fields.number(raw, fields.present_name(raw, "rope_theta", "rotary_emb_base"), 10000.0)
    share = fields.number(raw, fields.present_name(raw, "partial_rotary_factor", "rotary_pct"), 0.25)
    return {**raw, "rope_theta": theta, "partial_rotary_factor": share}


FAMILY = Family(parse_config, NAMES, (MASKS,))

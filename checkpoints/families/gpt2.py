"""GPT-2 (Radford et al., 2019): learned positions, layer norms, plain feed-forward layers, matrices stored
(in, out)."""

from ...model.config import Dense, GroupedQuery, LayerKind, ModelConfig, NormKind
from . import fields
from .family import Family
from .storage import Stored

LAYER = "transformer.h.{}."
NAMES = {
    "embed": Stored("transformer.wte.weight", "V,D->VD"),
    "positions": Stored("transformer.wpe.weight", "S,D->SD"),
    "layers.{}.attention_norm.gain": Stored(LAYER + "ln_1.weight", "D->D"),
    "layers.{}.attention_norm.bias": Stored(LAYER + "ln_1.bias", "D->D"),
    "layers.{}.attention.q": Stored(LAYER + "attn.c_attn.weight", "D,[NH]->DNH"),
    "layers.{}.attention.k": Stored(LAYER + "attn.c_attn.weight", "D,[NH]->DNH"),
    "layers.{}.attention.v": Stored(LAYER + "attn.c_attn.weight", "D,[NH]->DNH"),
    "layers.{}.attention.q_bias": Stored(LAYER + "attn.c_attn.bias", "[NH]->NH"),
    "layers.{}.attention.k_bias": Stored(LAYER + "attn.c_attn.bias", "[NH]->NH"),
    "layers.{}.attention.v_bias": Stored(LAYER + "attn.c_attn.bias", "[NH]->NH"),
    "layers.{}.attention.o": Stored(LAYER + "attn.c_proj.weight", "NH,D->NHD"),
    "layers.{}.attention.o_bias": Stored(LAYER + "attn.c_proj.bias", "D->D"),
    "layers.{}.ffn_norm.gain": Stored(LAYER + "ln_2.weight", "D->D"),
    "layers.{}.ffn_norm.bias": Stored(LAYER + "ln_2.bias", "D->D"),
    "layers.{}.ffn.up": Stored(LAYER + "mlp.c_fc.weight", "D,F->DF"),
    "layers.{}.ffn.up_bias": Stored(LAYER + "mlp.c_fc.bias", "F->F"),
    "layers.{}.ffn.down": Stored(LAYER + "mlp.c_proj.weight", "F,D->FD"),
    "layers.{}.ffn.down_bias": Stored(LAYER + "mlp.c_proj.bias", "D->D"),
    "norm.gain": Stored("transformer.ln_f.weight", "D->D"),
    "norm.bias": Stored("transformer.ln_f.bias", "D->D"),
    "head": Stored("lm_head.weight", "V,D->VD"),
}
MASKS = r"transformer\.h\.\d+\.attn\.(masked_)?bias"


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' GPT2Config."""
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        fields.allow_only(raw, name, False)
    hidden, heads = fields.integer(raw, "n_embd", 768), fields.integer(raw, "n_head", 12)
    if hidden % heads:
        raise ValueError(f"n_embd {hidden} is not a multiple of n_head {heads}")
    is_scaled = fields.flag(raw, "scale_attn_weights", True)
    attention = GroupedQuery(
        heads,
        heads,
        hidden // heads,
        rope=None,
        scale=None if is_scaled else 1.0,
        bias=True,
        output_bias=True,
    )
    activation = fields.activation(raw, "activation_function", "gelu_new")
    ffn = Dense(fields.integer(raw, "n_inner", 4 * hidden), activation, gated=False, bias=True)
    return ModelConfig(
        vocab_size=fields.integer(raw, "vocab_size", 50257),
        hidden_size=hidden,
        layers=(LayerKind(attention, ffn),) * fields.layer_count(raw, "n_layer", 12),
        max_position=fields.integer(raw, "n_positions", 1024),
        norm=NormKind("layer", fields.number(raw, "layer_norm_epsilon", 1e-5), bias=True),
        tied_embeddings=fields.flag(raw, "tie_word_embeddings", True),
        learned_positions=True,
    )


FAMILY = Family(parse_config, NAMES, (MASKS,))

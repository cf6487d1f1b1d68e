"""GPT-2 (Radford et al., 2019): learned positions, layer norms, plain feed-forward layers, matrices stored
(in, out)."""

from ...model.config import Dense, GroupedQuery, LayerKind, ModelConfig
from . import fields, parts
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
SIZES = {
    "hidden_size": ("n_embd", 768),
    "num_attention_heads": ("n_head", 12),
    "num_hidden_layers": ("n_layer", 12),
    "max_position_embeddings": ("n_positions", 1024),
    "vocab_size": ("vocab_size", 50257),
}
MASKS = r"transformer\.h\.\d+\.attn\.(masked_)?bias"


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' GPT2Config."""
    fields.allow_only(raw, "scale_attn_by_inverse_layer_idx", False)
    return model_config(raw, "gelu_new")


def model_config(raw: fields.Raw, activation: str, kv_heads: int | None = None) -> ModelConfig:
    """Return a model of GPT-2's layers.

    activation: default of `activation_function`.
    kv_heads: number of key heads; None: all heads.
    """
    fields.allow_only(raw, "add_cross_attention", False)
    raw = fields.with_common_names(raw, SIZES)
    hidden, heads = raw["hidden_size"], raw["num_attention_heads"]
    if hidden % heads:
        raise ValueError(f"n_embd {hidden} is not a multiple of n_head {heads}")
    is_scaled = fields.flag(raw, "scale_attn_weights", True)
    attention = GroupedQuery(
        heads,
        kv_heads or heads,
        hidden // heads,
        rope=None,
        scale=None if is_scaled else 1.0,
        bias=True,
        output_bias=True,
    )
    inner_size = fields.integer(raw, "n_inner", 4 * hidden)
    ffn = Dense(inner_size, fields.activation(raw, "activation_function", activation), gated=False, bias=True)
    norm = parts.layer_norm_config(raw, "layer_norm_epsilon")
    return parts.model_config(raw, LayerKind(attention, ffn), 1024, norm, tied=True, learned_positions=True)


FAMILY = Family(parse_config, NAMES, (MASKS,))

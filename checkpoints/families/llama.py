"""Llama 2 and 3 (Touvron et al., arXiv 2307.09288; Grattafiori et al., arXiv 2407.21783), and what is shaped like them."""

from typing import Any

from ...model.config import ModelConfig
from . import fields
from .stored import Stored

LAYER = "model.layers.{}."
NAMES = {
    "embed": Stored("model.embed_tokens.weight", "V,D->VD"),
    "layers.{}.attention_norm": Stored(LAYER + "input_layernorm.weight", "D->D"),
    "layers.{}.attention.q": Stored(LAYER + "self_attn.q_proj.weight", "NH,D->DNH"),
    "layers.{}.attention.k": Stored(LAYER + "self_attn.k_proj.weight", "KH,D->DKH"),
    "layers.{}.attention.v": Stored(LAYER + "self_attn.v_proj.weight", "KH,D->DKH"),
    "layers.{}.attention.o": Stored(LAYER + "self_attn.o_proj.weight", "D,NH->NHD"),
    "layers.{}.attention.q_bias": Stored(LAYER + "self_attn.q_proj.bias", "NH->NH"),
    "layers.{}.attention.k_bias": Stored(LAYER + "self_attn.k_proj.bias", "KH->KH"),
    "layers.{}.attention.v_bias": Stored(LAYER + "self_attn.v_proj.bias", "KH->KH"),
    "layers.{}.attention.o_bias": Stored(LAYER + "self_attn.o_proj.bias", "D->D"),
    "layers.{}.ffn_norm": Stored(LAYER + "post_attention_layernorm.weight", "D->D"),
    "layers.{}.ffn.gate": Stored(LAYER + "mlp.gate_proj.weight", "F,D->DF"),
    "layers.{}.ffn.up": Stored(LAYER + "mlp.up_proj.weight", "F,D->DF"),
    "layers.{}.ffn.down": Stored(LAYER + "mlp.down_proj.weight", "D,F->FD"),
    "layers.{}.ffn.gate_bias": Stored(LAYER + "mlp.gate_proj.bias", "F->F"),
    "layers.{}.ffn.up_bias": Stored(LAYER + "mlp.up_proj.bias", "F->F"),
    "layers.{}.ffn.down_bias": Stored(LAYER + "mlp.down_proj.bias", "D->D"),
    "norm": Stored("model.norm.weight", "D->D"),
    "head": Stored("lm_head.weight", "V,D->VD"),
}
IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)


def config(raw: fields.Raw) -> ModelConfig:
    """A `config.json` as our sizes; absent fields have the defaults of transformers' LlamaConfig."""
    fields.only(raw, "hidden_act", "silu")
    fields.only(raw, "sliding_window")
    fields.only(raw, "quantization_config")
    for kind in fields.value(raw, "layer_types", []):
        fields.only({"layer_types": kind}, "layer_types", "full_attention")
    heads = fields.integer(raw, "num_attention_heads")
    max_position = fields.integer(raw, "max_position_embeddings", 2048)
    return ModelConfig(
        vocab_size=fields.integer(raw, "vocab_size"),
        hidden_size=fields.integer(raw, "hidden_size"),
        ffn_size=fields.integer(raw, "intermediate_size"),
        num_layers=fields.integer(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=fields.integer(raw, "num_key_value_heads", heads),
        head_size=fields.head_size(raw),
        max_position=max_position,
        norm_eps=fields.number(raw, "rms_norm_eps", 1e-6),
        rope=fields.rope(raw, max_position),
        tied_embeddings=fields.flag(raw, "tie_word_embeddings", False),
        attention_bias=fields.flag(raw, "attention_bias", False),
        mlp_bias=fields.flag(raw, "mlp_bias", False),
    )


def export(config: ModelConfig) -> dict[str, Any]:
    """Our sizes as the fields of a `config.json`: `config` read backwards."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "rope_scaling": fields.rope_scaling(config.rope),
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
    }

"""Sarvam 30B (Sarvam AI, 2026): GLM-4.5 by other names of fields and tensors."""

from typing import Any

from ...model.config import LayerKind, ModelConfig
from . import deepseek, fields, parts, sarvam_mla
from .family import Family
from .storage import Stored

ATTENTION = parts.LAYER + "attention."
QKV = ATTENTION + "query_key_value."
NAMES = (
    parts.OUTER_NAMES
    | parts.NORMS
    | deepseek.MIXTURE
    | {
        "embed": Stored("model.word_embeddings.weight", "V,D->VD"),
        "layers.{}.attention.q": Stored(QKV + "weight", "[NH],D->DNH"),
        "layers.{}.attention.k": Stored(QKV + "weight", "[KH],D->DKH"),
        "layers.{}.attention.v": Stored(QKV + "weight", "[KH],D->DKH"),
        "layers.{}.attention.q_bias": Stored(QKV + "bias", "[NH]->NH"),
        "layers.{}.attention.k_bias": Stored(QKV + "bias", "[KH]->KH"),
        "layers.{}.attention.v_bias": Stored(QKV + "bias", "[KH]->KH"),
        "layers.{}.attention.o": Stored(ATTENTION + "dense.weight", "D,NH->NHD"),
        "layers.{}.attention.q_norm": Stored(ATTENTION + "query_layernorm.weight", "H->H"),
        "layers.{}.attention.k_norm": Stored(ATTENTION + "key_layernorm.weight", "H->H"),
        "layers.{}.ffn.correction": Stored(parts.LAYER + "mlp.gate.expert_bias", "E->E"),
    }
)
EXPERTS = {**sarvam_mla.EXPERTS, "moe_intermediate_size": 1024, "num_experts_per_tok": 6}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' SarvamMoEConfig."""
    fields.allow_only(raw, "scoring_func", "sigmoid")
    fields.allow_only(raw, "score_function", "sigmoid")
    fields.allow_only(raw, "use_bias", False)
    norm, size = parts.rms_norm_config(raw), fields.head_size(raw, 64)
    bias = fields.flag(raw, fields.present_name(raw, "attention_bias", "use_qkv_bias"), False)
    has_qk_norm = fields.flag(raw, "use_qk_norm", True)
    kinds: dict[str, Any] = {"kv_heads": 4, "bias": bias, "qk_norm": norm if has_qk_norm else None}
    attention = parts.partial_rotary_attention_config(raw, size, 131072, share=1.0, theta=8e6, **kinds)
    names = {"count_fields": sarvam_mla.COUNT_FIELDS, "shared_fields": sarvam_mla.SHARED_FIELDS}
    ffns = deepseek.ffn_configs(raw, deepseek.corrected_experts_config(raw, EXPERTS, **names), dense=1)
    layers = [LayerKind(attention, ffn) for ffn in ffns]
    return parts.model_config(raw, layers, max_position=131072, norm=norm)


FAMILY = Family(parse_config, NAMES, parts.MTP_LAYERS)

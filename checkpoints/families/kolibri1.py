"""Kolibri 1 (2026): EXAONE 4's attention, norms before and after each sublayer, and mixtures of experts that
are chosen by corrected logits and weighed by a sigmoid."""

from ...model.config import Experts, LayerKind, ModelConfig
from . import exaone4, fields, parts
from .family import Family
from .storage import Stored

NAMES = (
    parts.BACKBONE
    | parts.QK_NORMS
    | parts.expert_names("mlp", "gate_proj", "up_proj", "down_proj")
    | parts.gated_ffn_names("ffn.shared", "mlp.shared_experts")
    | {
        "layers.{}.attention_post_norm.gain": Stored(parts.LAYER + "post_attn_norm.weight", "D->D"),
        "layers.{}.ffn_post_norm.gain": Stored(parts.LAYER + "post_ffn_norm.weight", "D->D"),
        "layers.{}.ffn.correction": Stored(parts.LAYER + "moe.router.expert_bias", "E->E"),
    }
)
DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-6,
    "sliding_window": 513,
}
FULL_INTERVAL = 5  # of layers without a window


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Kolibri1Config."""
    raw = {**DEFAULTS, **raw, "sliding_window_pattern": FULL_INTERVAL}
    experts = experts_config(raw)
    layers = [LayerKind(mixer, experts) for mixer in exaone4.mixers(raw)]
    return parts.model_config(
        raw, layers, max_position=262144, norm=parts.rms_norm_config(raw), post_norms=True
    )


def experts_config(raw: fields.Raw) -> Experts:
    """Return experts, and a shared one."""
    return parts.experts_config(
        raw,
        fields.expert_count(raw, fields.present_name(raw, "num_experts", "num_local_experts"), 384),
        6,
        fields.integer(raw, "moe_intermediate_size", 512),
        scoring="sigmoid",
        correction=True,
        corrects_logits=True,
        normalised=fields.flag(raw, "norm_topk_prob", False),
        shared=fields.integer(raw, "shared_expert_intermediate_size", 512),
    )


FAMILY = Family(parse_config, NAMES)

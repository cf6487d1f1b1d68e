"""Bamba (IBM, Princeton, CMU and UIUC, 2024): Mamba-2 (arXiv 2405.21060) on most layers, attention that
rotates half of each head on the others, and a gated feed-forward layer on all."""

from ...model.config import GroupedQuery, LayerKind, ModelConfig
from . import falcon_h1, fields, mamba2, parts
from .family import Family
from .granitemoehybrid import mamba_inner_size

LENGTH, ROTATED_SHARE = 262144, 0.5


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' BambaConfig."""
    norm, attention = parts.rms_norm_config(raw, 1e-5), attention_config(raw)
    mixer = mamba2.hybrid_mixer_config(raw, mamba_inner_size(raw), eps=norm.eps)
    ffn = parts.dense_ffn_config(raw, bias=fields.flag(raw, "mlp_bias", False))
    attending = fields.layer_indices(raw, "attn_layer_indices", [])
    layers = [LayerKind(attention if i in attending else mixer, ffn) for i in range(parts.num_layers(raw))]
    return parts.model_config(raw, layers, max_position=LENGTH, norm=norm)


def attention_config(raw: fields.Raw) -> GroupedQuery:
    """Return attention. Only the field of a rope may state another share of a head than half."""
    fields.allow_only(raw, "partial_rotary_factor", ROTATED_SHARE)
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    return parts.partial_rotary_attention_config(
        raw, size, LENGTH, ROTATED_SHARE, kv_heads=8, bias=bias, output_bias=bias
    )


FAMILY = Family(parse_config, falcon_h1.NAMES)

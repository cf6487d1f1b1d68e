"""MiniCPM 3 (Hu et al., arXiv 2404.06395): DeepSeek's latent attention with a rope in halves, and factors of
the embedding, of what sublayers add, and of logits."""

from typing import Any

from ...model.config import LayerKind, ModelConfig
from . import deepseek, fields, parts
from .family import Family

NAMES = (
    parts.OUTER_NAMES
    | parts.NORMS
    | parts.FFN
    | parts.FFN_BIASES
    | {path: stored for path, stored in deepseek.NAMES.items() if ".attention." in path}
)
SIZES = {"kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' MiniCPM3Config."""
    hidden, count = fields.integer(raw, "hidden_size"), parts.num_layers(raw)
    attention = deepseek.latent_attention_config(with_sizes(raw), length=32768, interleaved=False)
    ffn = parts.dense_ffn_config(raw, bias=fields.flag(raw, "mlp_bias", False))
    return parts.model_config(
        raw,
        LayerKind(attention, ffn),
        max_position=32768,
        norm=parts.rms_norm_config(raw, 1e-5),
        tied=True,
        embedding_scale=fields.number(raw, "scale_emb", 12.0),
        residual_scale=(fields.nullable(fields.number, raw, "scale_depth", 1.4) or count**0.5) / count**0.5,
        logit_scale=(fields.nullable(fields.integer, raw, "dim_model_base", 256) or hidden) / hidden,
    )


def with_sizes(raw: fields.Raw) -> dict[str, Any]:
    """Return the fields with the family's sizes of latent attention, as far as they are absent."""
    sizes: dict[str, Any] = {name: fields.integer(raw, name, default) for name, default in SIZES.items()}
    sizes["v_head_dim"] = fields.integer(raw, "v_head_dim", fields.head_size({**raw, "head_dim": None}))
    sizes["q_lora_rank"] = fields.nullable(fields.integer, raw, "q_lora_rank", 768)
    return {**raw, **sizes}


FAMILY = Family(parse_config, NAMES)

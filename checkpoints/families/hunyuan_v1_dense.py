"""Hunyuan's dense models (Tencent Hunyuan Team, 2025): Llama that norms queries and keys after their
rotation."""

from ...model.config import GroupedQuery, LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import read_rope
from .storage import Stored

QK_NORMS = {
    "layers.{}.attention.q_norm": Stored(parts.LAYER + "self_attn.query_layernorm.weight", "H->H"),
    "layers.{}.attention.k_norm": Stored(parts.LAYER + "self_attn.key_layernorm.weight", "H->H"),
}
NAMES = parts.LLAMA | parts.BIASES | QK_NORMS


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers'
    HunYuanDenseV1Config."""
    layer = LayerKind(attention_config(raw), parts.dense_ffn_config(raw))
    return parts.model_config(raw, layer, max_position=2048, norm=parts.rms_norm_config(raw, 1e-5))


def attention_config(raw: fields.Raw) -> GroupedQuery:
    """Return attention that norms queries and keys after their rotation."""
    for name, value in {"use_qk_norm": True, "mlp_bias": False, "use_cla": False}.items():
        fields.allow_only(raw, name, value)
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    norm, rope = parts.rms_norm_config(raw, 1e-5), read_rope(raw, size, length=2048)
    kinds = {"qk_norm": norm, "norm_after_rope": True, "bias": bias, "output_bias": bias}
    return parts.grouped_query_config(raw, rope, size, **kinds)


FAMILY = Family(parse_config, NAMES)

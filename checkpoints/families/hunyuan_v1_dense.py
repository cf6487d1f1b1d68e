"""Hunyuan's dense models (Tencent Hunyuan Team, 2025): Llama with queries and keys normed after they are
turned."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import rope
from .stored import Stored

NAMES = (
    parts.LLAMA
    | parts.BIASES
    | {
        "layers.{}.attention.q_norm": Stored(parts.LAYER + "self_attn.query_layernorm.weight", "H->H"),
        "layers.{}.attention.k_norm": Stored(parts.LAYER + "self_attn.key_layernorm.weight", "H->H"),
    }
)


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' HunYuanDenseV1Config."""
    for name, value in {"use_qk_norm": True, "mlp_bias": False, "use_cla": False}.items():
        fields.only(raw, name, value)
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    norm, turn = parts.rms(raw, 1e-5), rope(raw, size, length=2048)
    kinds = {"qk_norm": norm, "norm_turned": True, "bias": bias, "output_bias": bias}
    attention = parts.grouped_query(raw, turn, size, **kinds)
    return parts.decoder(raw, LayerKind(attention, parts.dense(raw)), max_position=2048, norm=norm)


FAMILY = Family(config, NAMES, parts.IGNORED)

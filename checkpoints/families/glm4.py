"""GLM-4-0414 and GLM-Z1: GLM-4-9B with norms after attention and feed-forward layers too."""

from ...model.config import LayerKind, ModelConfig
from . import fields, glm, parts
from .family import Family
from .storage import Stored

POST_NORMS = {
    "layers.{}.attention_post_norm.gain": Stored(parts.LAYER + "post_self_attn_layernorm.weight", "D->D"),
    "layers.{}.ffn_post_norm.gain": Stored(parts.LAYER + "post_mlp_layernorm.weight", "D->D"),
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Glm4Config."""
    layer, norm = (
        LayerKind(glm.attention_config(raw), parts.dense_ffn_config(raw)),
        parts.rms_norm_config(raw, 1.5625e-7),
    )
    return parts.model_config(raw, layer, max_position=131072, norm=norm, post_norms=True)


FAMILY = Family(parse_config, glm.NAMES | POST_NORMS)

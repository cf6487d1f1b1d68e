"""Hunyuan 3 (Tencent Hunyuan Team, 2026): Qwen 3's attention, and mixtures of experts that are chosen by a
sigmoid and a correction. Layers that predict several tokens ahead are left out."""

from typing import Any

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .ropes import read_rope
from .storage import Stored

MIXTURE = (
    parts.expert_names("mlp", "gate_proj", "up_proj", "down_proj")
    | parts.gated_ffn_names("ffn.shared", "mlp.shared_mlp")
    | {
        "layers.{}.ffn.router": Stored(parts.LAYER + "mlp.router.gate.weight", "E,D->DE"),
        "layers.{}.ffn.correction": Stored(parts.LAYER + "mlp.expert_bias", "E->E"),
    }
)
NAMES = parts.LLAMA | parts.BIASES | parts.QK_NORMS | MIXTURE


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' HYV3Config."""
    fields.allow_only(raw, "mlp_bias", False)
    size, bias = fields.head_size(raw, 128), fields.flag(raw, "attention_bias", False)
    norm, rope = parts.rms_norm_config(raw, 1e-5), read_rope(raw, size, length=131072, theta=11158840.0)
    kinds: dict[str, Any] = {"kv_heads": 8, "qk_norm": norm, "bias": bias, "output_bias": bias}
    attention = parts.grouped_query_config(raw, rope, size, **kinds)
    layers = [LayerKind(attention, ffn) for ffn in ffn_configs(raw)]
    return parts.model_config(raw, layers, max_position=131072, norm=norm)


def ffn_configs(raw: fields.Raw) -> list[Any]:
    """Return each layer's feed-forward layer: all but the first are mixtures by default."""
    count = fields.expert_count(raw, fields.present_name(raw, "num_experts", "num_local_experts"), 192)
    size = fields.integer(raw, "moe_intermediate_size", 1536)
    experts = parts.experts_config(
        raw,
        count,
        8,
        size,
        scoring="sigmoid",
        correction=True,
        factor=fields.number(raw, "router_scaling_factor", 2.826),
        shared=size * fields.expert_count(raw, "num_shared_experts", 1),
    )
    return parts.typed_ffn_configs(raw, experts, parts.dense_head(raw, 1))


FAMILY = Family(parse_config, NAMES, parts.MTP_LAYERS)

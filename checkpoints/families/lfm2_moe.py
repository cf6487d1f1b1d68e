"""LFM2's mixtures of experts (Liquid AI, arXiv 2511.23404), which are chosen by a sigmoid and a
correction."""

from ...model.config import Experts, ModelConfig
from . import fields, lfm2, parts
from .family import Family
from .storage import Stored

BLOCK = parts.LAYER + "feed_forward."
NAMES = (
    lfm2.COMMON_NAMES
    | parts.expert_names("feed_forward", "w1", "w3", "w2")
    | {"layers.{}.ffn.correction": Stored(BLOCK + "expert_bias", "E->E")}
)


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Lfm2MoeConfig.

    `layer_types` has no default.
    """
    count = parts.num_layers(raw)
    fields.value(raw, "layer_types", fields.REQUIRED)
    first, mixture = fields.non_negative_integer(raw, "num_dense_layers", 2), experts_config(raw)
    ffns = [parts.dense_ffn_config(raw, "silu") if i < first else mixture for i in range(count)]
    return lfm2.model_config(raw, [""] * count, ffns)


def experts_config(raw: fields.Raw) -> Experts:
    """Return experts that are chosen by a sigmoid and a correction."""
    return Experts(
        count=fields.expert_count(raw, fields.present_name(raw, "num_experts", "num_local_experts"), 32),
        active=fields.integer(raw, "num_experts_per_tok", 4),
        size=fields.integer(raw, "moe_intermediate_size", 1792),
        scoring="sigmoid",
        normalised=fields.flag(raw, "norm_topk_prob", True),
        factor=fields.number(raw, "routed_scaling_factor", 1.0),
        correction=fields.flag(raw, "use_expert_bias", True),
    )


FAMILY = Family(parse_config, NAMES)

"""LFM2's mixtures of experts (Liquid AI, arXiv 2511.23404), which a sigmoid and a correction choose."""

from ...model.config import Experts, ModelConfig
from . import fields, lfm2, parts
from .family import Family
from .stored import Stored

BLOCK = parts.LAYER + "feed_forward."
NAMES = (
    lfm2.OTHERS
    | parts.experts("feed_forward", "w1", "w3", "w2")
    | {"layers.{}.ffn.correction": Stored(BLOCK + "expert_bias", "E->E")}
)


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Lfm2MoeConfig; `layer_types` has none."""
    count = parts.num_layers(raw)
    fields.value(raw, "layer_types", fields.REQUIRED)
    first, mixed = fields.count(raw, "num_dense_layers", 2), experts(raw)
    ffns = [parts.dense(raw, "silu") if i < first else mixed for i in range(count)]
    return lfm2.decoder(raw, [""] * count, ffns)


def experts(raw: fields.Raw) -> Experts:
    return Experts(
        count=fields.experts(raw, fields.named(raw, "num_experts", "num_local_experts"), 32),
        active=fields.integer(raw, "num_experts_per_tok", 4),
        size=fields.integer(raw, "moe_intermediate_size", 1792),
        scoring="sigmoid",
        normalised=fields.flag(raw, "norm_topk_prob", True),
        factor=fields.number(raw, "routed_scaling_factor", 1.0),
        correction=fields.flag(raw, "use_expert_bias", True),
    )


FAMILY = Family(config, NAMES, parts.IGNORED)

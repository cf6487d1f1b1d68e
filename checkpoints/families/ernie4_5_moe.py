"""ERNIE 4.5 with mixtures of experts (Baidu, technical report of 2025): chosen by softmax and a correction;
blocks that predict several tokens ahead are left out."""

from ...model.config import Dense, Experts, LayerKind, ModelConfig
from . import deepseek, ernie4_5, fields, parts
from .family import Family
from .stored import Stored

CORRECTION = Stored(parts.LAYER + "mlp.moe_statics.e_score_correction_bias", "1,E->E")
NAMES = parts.BACKBONE | deepseek.MIXTURE | {"layers.{}.ffn.correction": CORRECTION}
AHEAD = r"model\.mtp_.*"


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' Ernie4_5_MoeConfig."""
    fields.only(raw, "use_bias", False)
    attention = ernie4_5.attention(raw, fields.head_size(raw), 4, bias=False)
    layers = [LayerKind(attention, ffn) for ffn in ffns(raw)]
    return parts.decoder(raw, layers, max_position=131072, norm=parts.rms(raw, 1e-5), tied=True)


def ffns(raw: fields.Raw) -> list[Dense | Experts]:
    """Every `moe_layer_interval`-th layer from `moe_layer_start_index` to `moe_layer_end_index`, where -1 is
    the last, is a mixture of experts."""
    count, step = parts.num_layers(raw), fields.integer(raw, "moe_layer_interval", 1)
    first, end = fields.count(raw, "moe_layer_start_index", 1), fields.value(raw, "moe_layer_end_index", -1)
    last = count - 1 if end == -1 else fields.count(raw, "moe_layer_end_index")
    mixed = [first <= i <= last and (i + 1) % step == 0 for i in range(count)]
    mixture = experts(raw)
    return [mixture if here else parts.dense(raw) for here in mixed]


def experts(raw: fields.Raw) -> Experts:
    fields.only(raw, "moe_norm_min", 1e-12)
    size = fields.integer(raw, "moe_intermediate_size", 1536)
    return Experts(
        count=fields.experts(raw, fields.named(raw, "moe_num_experts", "num_experts"), 64),
        active=fields.integer(raw, fields.named(raw, "moe_k", "num_experts_per_tok"), 6),
        size=size,
        activation=fields.activation(raw, "hidden_act", "silu"),
        correction=True,
        shared=size * fields.count(raw, "moe_num_shared_experts", 2),
    )


FAMILY = Family(config, NAMES, (*parts.IGNORED, AHEAD))

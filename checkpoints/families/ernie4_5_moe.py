"""ERNIE 4.5 with mixtures of experts (Baidu, technical report of 2025): chosen by softmax and a correction;
blocks that predict several tokens ahead are left out."""

from ...model.config import Dense, Experts, LayerKind, ModelConfig
from . import deepseek, ernie4_5, fields, parts
from .family import Family
from .storage import Stored

CORRECTION = Stored(parts.LAYER + "mlp.moe_statics.e_score_correction_bias", "1,E->E")
NAMES = parts.BACKBONE | deepseek.MIXTURE | {"layers.{}.ffn.correction": CORRECTION}
MTP_TENSORS = r"model\.mtp_.*"


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers'
    Ernie4_5_MoeConfig."""
    fields.allow_only(raw, "use_bias", False)
    attention = ernie4_5.attention_config(raw, fields.head_size(raw), 4, bias=False)
    layers = [LayerKind(attention, ffn) for ffn in ffn_configs(raw)]
    return parts.model_config(
        raw, layers, max_position=131072, norm=parts.rms_norm_config(raw, 1e-5), tied=True
    )


def ffn_configs(raw: fields.Raw) -> list[Dense | Experts]:
    """Return each layer's feed-forward layer.

    Every `moe_layer_interval`-th from `moe_layer_start_index` to `moe_layer_end_index` is a mixture of
    experts. The index -1 is the last layer.
    """
    count, step = parts.num_layers(raw), fields.integer(raw, "moe_layer_interval", 1)
    first, end = (
        fields.non_negative_integer(raw, "moe_layer_start_index", 1),
        fields.value(raw, "moe_layer_end_index", -1),
    )
    last = count - 1 if end == -1 else fields.non_negative_integer(raw, "moe_layer_end_index")
    mixed = [first <= i <= last and (i + 1) % step == 0 for i in range(count)]
    mixture = experts_config(raw)
    return [mixture if is_mixture else parts.dense_ffn_config(raw) for is_mixture in mixed]


def experts_config(raw: fields.Raw) -> Experts:
    """Return experts that are chosen by a softmax and a correction."""
    fields.allow_only(raw, "moe_norm_min", 1e-12)
    size = fields.integer(raw, "moe_intermediate_size", 1536)
    return Experts(
        count=fields.expert_count(raw, fields.present_name(raw, "moe_num_experts", "num_experts"), 64),
        active=fields.integer(raw, fields.present_name(raw, "moe_k", "num_experts_per_tok"), 6),
        size=size,
        activation=fields.activation(raw, "hidden_act", "silu"),
        correction=True,
        shared=size * fields.non_negative_integer(raw, "moe_num_shared_experts", 2),
    )


FAMILY = Family(parse_config, NAMES, (MTP_TENSORS,))

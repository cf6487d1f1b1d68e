"""Hunyuan A13B (Tencent Hunyuan Team, 2025): the dense Hunyuan's attention, and mixtures of experts with a
shared one of their size."""

from ...model.config import Experts, LayerKind, ModelConfig
from . import fields, hunyuan_v1_dense, parts
from .family import Family
from .storage import Stored

EXPERTS = (
    parts.expert_names("mlp", "gate_proj", "up_proj", "down_proj")
    | parts.gated_ffn_names("ffn.shared", "mlp.shared_mlp")
    | {"layers.{}.ffn.router": Stored(parts.LAYER + "mlp.gate.wg.weight", "E,D->DE")}
)
NAMES = parts.BACKBONE | parts.BIASES | hunyuan_v1_dense.QK_NORMS | EXPERTS


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers'
    HunYuanMoEV1Config."""
    fields.allow_only(raw, "moe_layer_num_skipped", 0)
    mixer = hunyuan_v1_dense.attention_config(raw)
    layers = [LayerKind(mixer, ffn) for ffn in expert_configs(raw)]
    return parts.model_config(raw, layers, max_position=2048, norm=parts.rms_norm_config(raw, 1e-5))


def expert_configs(raw: fields.Raw) -> list[Experts]:
    """Return each layer's experts: `moe_topk` may differ. All experts have `intermediate_size`."""
    layers, size = parts.num_layers(raw), fields.integer(raw, "intermediate_size")
    for name, only in {"moe_intermediate_size": size, "num_shared_expert": 1}.items():
        for stated in fields.integers_by_layer(raw, name, layers, only):
            fields.allow_only({name: stated}, name, only)
    count = fields.expert_count(raw, fields.present_name(raw, "num_experts", "num_local_experts"), 1)
    name = fields.present_name(raw, "moe_topk", "num_experts_per_tok")
    activation = fields.activation(raw, "hidden_act", "silu")
    return [
        Experts(count, active, size, activation, shared=size)
        for active in fields.integers_by_layer(raw, name, layers, 1)
    ]


FAMILY = Family(parse_config, NAMES)

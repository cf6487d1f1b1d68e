"""Phi-1, 1.5 and 2 (Gunasekar et al., arXiv 2306.11644; Li et al., arXiv 2309.05463): attention and
feed-forward layer read one layer norm. Feed-forward layers have no gate, all projections have biases, and a
part of each head is rotated."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .storage import Stored

NAMES = (
    parts.OUTER_NAMES
    | parts.ATTENTION
    | parts.QKV_BIASES
    | parts.plain_ffn_names("mlp.fc1", "mlp.fc2")
    | {
        "layers.{}.attention_norm.gain": Stored(parts.LAYER + "input_layernorm.weight", "D->D"),
        "layers.{}.attention_norm.bias": Stored(parts.LAYER + "input_layernorm.bias", "D->D"),
        "layers.{}.attention.o": Stored(parts.LAYER + "self_attn.dense.weight", "D,NH->NHD"),
        "layers.{}.attention.o_bias": Stored(parts.LAYER + "self_attn.dense.bias", "D->D"),
        "norm.gain": Stored("model.final_layernorm.weight", "D->D"),
        "norm.bias": Stored("model.final_layernorm.bias", "D->D"),
        "head_bias": Stored("lm_head.bias", "V->V"),
    }
)


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' PhiConfig."""
    fields.allow_only(raw, "qk_layernorm", False)
    size = fields.head_size(raw)
    attention = parts.partial_rotary_attention_config(
        raw, size, length=2048, share=0.5, bias=True, output_bias=True
    )
    activation = fields.activation(raw, "hidden_act", "gelu_new")
    return parts.model_config(
        raw,
        LayerKind(attention, parts.dense_ffn_config(raw, activation, gated=False, bias=True)),
        max_position=2048,
        norm=parts.layer_norm_config(raw, "layer_norm_eps"),
        parallel="one norm",
        head_bias=True,
    )


FAMILY = Family(parse_config, NAMES)

"""Phi-1, 1.5 and 2 (Gunasekar et al., arXiv 2306.11644; Li et al., arXiv 2309.05463): both parts of a layer
read one layer norm; plain feed-forward layers, biases everywhere, a part of each head is turned."""

from ...model.config import LayerKind, ModelConfig
from . import fields, parts
from .family import Family
from .stored import Stored

NAMES = (
    parts.OUTSIDE
    | parts.ATTENTION
    | parts.QKV_BIASES
    | parts.plain("mlp.fc1", "mlp.fc2")
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


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' PhiConfig."""
    fields.only(raw, "qk_layernorm", False)
    size = fields.head_size(raw)
    attention = parts.partly_turned(raw, size, length=2048, share=0.5, bias=True, output_bias=True)
    activation = fields.activation(raw, "hidden_act", "gelu_new")
    return parts.decoder(
        raw,
        LayerKind(attention, parts.dense(raw, activation, gated=False, bias=True)),
        max_position=2048,
        norm=parts.layer_norm(raw, "layer_norm_eps"),
        parallel="one norm",
        head_bias=True,
    )


FAMILY = Family(config, NAMES, parts.IGNORED)

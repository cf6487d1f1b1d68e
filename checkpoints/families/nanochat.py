"""nanochat (Karpathy, 2025): norms without gains, also of the embeddings, of queries and of keys. The rope
turns the other way, and feed-forward layers have no gate."""

from dataclasses import replace

from ...model.config import LayerKind, ModelConfig, NormKind
from . import fields, parts
from .family import Family
from .ropes import read_rope
from .storage import Stored

NAMES = {
    "embed": parts.OUTER_NAMES["embed"],
    "head": parts.OUTER_NAMES["head"],
    **(parts.ATTENTION | parts.BIASES),
    "layers.{}.ffn.up": Stored(parts.LAYER + "mlp.fc1.weight", "F,D->DF"),
    "layers.{}.ffn.down": Stored(parts.LAYER + "mlp.fc2.weight", "D,F->FD"),
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' NanoChatConfig."""
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    norm = NormKind(eps=fields.number(raw, "rms_norm_eps", 1e-6), gain=False)
    rope = replace(read_rope(raw, size, length=2048), backward=True)
    attention = parts.grouped_query_config(
        raw, rope, size, bias=bias, output_bias=bias, qk_norm=norm, norm_after_rope=True
    )
    activation = fields.activation(raw, "hidden_act", "relu2")
    return parts.model_config(
        raw,
        LayerKind(attention, parts.dense_ffn_config(raw, activation, gated=False)),
        max_position=2048,
        norm=norm,
        embedding_norm=True,
        logit_softcap=fields.nullable(fields.number, raw, "final_logit_softcapping", 15.0),
    )


FAMILY = Family(parse_config, NAMES)

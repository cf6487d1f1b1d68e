"""BLOOM (BigScience, arXiv 2211.05100): ALiBi in place of positions, a norm of the embeddings, projections
joined head by head. It has no longest context; `seq_length` is that of its training."""

from ...model.config import Dense, GroupedQuery, LayerKind, ModelConfig
from . import falcon, fields, parts
from .family import Family
from .storage import Stored

NAMES = falcon.NAMES | {
    "embed_norm.gain": Stored("transformer.word_embeddings_layernorm.weight", "D->D"),
    "embed_norm.bias": Stored("transformer.word_embeddings_layernorm.bias", "D->D"),
}
SIZES = {
    "num_attention_heads": ("n_head", 8),
    "num_hidden_layers": ("n_layer", 2),
    "max_position_embeddings": ("seq_length", 2048),
    "vocab_size": ("vocab_size", 250880),
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' BloomConfig."""
    fields.allow_only(raw, "apply_residual_connection_post_layernorm", False)
    hidden = fields.integer(raw, fields.present_name(raw, "n_embed", "hidden_size"), 64)
    raw = fields.with_common_names(raw, SIZES) | {"hidden_size": hidden}
    heads = raw["num_attention_heads"]
    attention = GroupedQuery(
        heads, heads, fields.divided_head_size(raw), rope=None, alibi=8.0, bias=True, output_bias=True
    )
    return parts.model_config(
        raw,
        LayerKind(attention, Dense(4 * hidden, "gelu_tanh", gated=False, bias=True)),
        max_position=2048,
        norm=parts.layer_norm_config(raw, "layer_norm_epsilon"),
        tied=True,
        embedding_norm=True,
    )


FAMILY = Family(parse_config, NAMES)

"""GPT-Neo (Black et al., 2021): GPT-2 with separate projections without biases, scores without a scale, and a
window on every second layer."""

from typing import Any

from ...model.config import Dense, LayerKind, ModelConfig
from ...refusals import quote
from . import fields, gpt2, parts
from .family import Family
from .storage import Stored

LAYER = gpt2.LAYER
NAMES = (
    {path: stored for path, stored in gpt2.NAMES.items() if ".attention." not in path}
    | parts.plain_ffn_names("mlp.c_fc", "mlp.c_proj", LAYER)
    | {
        "layers.{}.attention.q": Stored(LAYER + "attn.attention.q_proj.weight", "NH,D->DNH"),
        "layers.{}.attention.k": Stored(LAYER + "attn.attention.k_proj.weight", "KH,D->DKH"),
        "layers.{}.attention.v": Stored(LAYER + "attn.attention.v_proj.weight", "KH,D->DKH"),
        "layers.{}.attention.o": Stored(LAYER + "attn.attention.out_proj.weight", "D,NH->NHD"),
        "layers.{}.attention.o_bias": Stored(LAYER + "attn.attention.out_proj.bias", "D->D"),
    }
)
MASKS = r"transformer\.h\.\d+\.attn\.attention\.(masked_)?bias"
SIZES = {
    "hidden_size": ("hidden_size", 2048),
    "num_attention_heads": ("num_heads", 16),
    "num_hidden_layers": ("num_layers", 24),
    "vocab_size": ("vocab_size", 50257),
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' GPTNeoConfig."""
    raw = {**fields.with_common_names(raw, SIZES), "num_key_value_heads": None}
    inner_size = fields.integer(raw, "intermediate_size", 4 * raw["hidden_size"])
    activation = fields.activation(raw, "activation_function", "gelu_new")
    ffn = Dense(inner_size, activation, gated=False, bias=True)
    windows = {"global": None, "local": fields.integer(raw, "window_size", 256)}
    kinds: dict[str, Any] = {"scale": 1.0, "output_bias": True}
    size = fields.divided_head_size(raw)
    layers = [
        LayerKind(parts.grouped_query_config(raw, None, size, window=windows[kind], **kinds), ffn)
        for kind in attention_types(raw)
    ]
    norm = parts.layer_norm_config(raw, "layer_norm_epsilon")
    return parts.model_config(raw, layers, 2048, norm, tied=True, learned_positions=True)


def attention_types(raw: fields.Raw) -> list[str]:
    """Return each layer's type, "global" or "local", from pairs of some types and how often they repeat."""
    stated = fields.value(raw, "attention_types", [[["global", "local"], 12]])
    try:
        types = [kind for kinds, count in stated for _ in range(count) for kind in kinds]
    except (TypeError, ValueError):
        types = []
    known = ("global", "local")
    if len(types) != parts.num_layers(raw) or any(kind not in known for kind in types):
        raise ValueError(
            f"attention_types is {quote(stated)}, expected pairs of types ('global', 'local') and counts, "
            f"for {parts.num_layers(raw)} layers"
        )
    fields.allow_only(raw, "attention_layers", types)
    return types


FAMILY = Family(parse_config, NAMES, (MASKS,))

"""GPT-J (Wang and Komatsuzaki, 2021): attention and a plain feed-forward layer read one layer norm.
Neighbouring dimensions are rotated in a part of each head, and logits have a bias."""

from ...model.config import Dense, LayerKind, ModelConfig
from ...model.rope import Rope
from . import fields, parts
from .family import Family
from .storage import Stored

LAYER = "transformer.h.{}."
OTHERS = {
    "embed": Stored("transformer.wte.weight", "V,D->VD"),
    "layers.{}.attention_norm.gain": Stored(LAYER + "ln_1.weight", "D->D"),
    "layers.{}.attention_norm.bias": Stored(LAYER + "ln_1.bias", "D->D"),
    "layers.{}.attention.o": Stored(LAYER + "attn.out_proj.weight", "D,NH->NHD"),
    "norm.gain": Stored("transformer.ln_f.weight", "D->D"),
    "norm.bias": Stored("transformer.ln_f.bias", "D->D"),
    "head": Stored("lm_head.weight", "V,D->VD"),
    "head_bias": Stored("lm_head.bias", "V->V"),
} | parts.plain_ffn_names("mlp.fc_in", "mlp.fc_out", LAYER)
NAMES = OTHERS | {
    "layers.{}.attention.q": Stored(LAYER + "attn.q_proj.weight", "NH,D->DNH"),
    "layers.{}.attention.k": Stored(LAYER + "attn.k_proj.weight", "KH,D->DKH"),
    "layers.{}.attention.v": Stored(LAYER + "attn.v_proj.weight", "KH,D->DKH"),
}
MASKS = r"transformer\.h\.\d+\.attn\.(masked_bias|bias|causal_mask)"
SIZES = {
    "hidden_size": ("n_embd", 4096),
    "num_attention_heads": ("n_head", 16),
    "num_hidden_layers": ("n_layer", 28),
    "max_position_embeddings": ("n_positions", 2048),
    "vocab_size": ("vocab_size", 50400),
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' GPTJConfig."""
    raw = {**fields.with_common_names(raw, SIZES), "num_key_value_heads": None}
    size = fields.divided_head_size(raw)
    rotary_size = fields.integer(raw, "rotary_dim", 64)
    attention = parts.grouped_query_config(raw, Rope(interleaved=True), size, rotary_size=rotary_size)
    inner_size = fields.integer(raw, "n_inner", 4 * raw["hidden_size"])
    activation = fields.activation(raw, "activation_function", "gelu_new")
    return parts.model_config(
        raw,
        LayerKind(attention, Dense(inner_size, activation, gated=False, bias=True)),
        max_position=2048,
        norm=parts.layer_norm_config(raw, "layer_norm_epsilon"),
        parallel="one norm",
        head_bias=True,
    )


FAMILY = Family(parse_config, NAMES, (MASKS,))

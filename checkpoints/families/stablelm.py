"""Stable LM (Bellagente et al., arXiv 2402.17834): Llama with layer norms that rotates a part of each head.
The 12B model norms each head with a gain for each, and attention and feed-forward layer read one norm."""

from ...model.config import LayerKind, ModelConfig, NormKind
from . import fields, parts
from .family import Family
from .storage import Stored

HEAD_NORMS = {
    "layers.{}.attention.q_norm": Stored(parts.LAYER + "self_attn.q_layernorm.norms.{}.weight", "H->NH"),
    "layers.{}.attention.k_norm": Stored(parts.LAYER + "self_attn.k_layernorm.norms.{}.weight", "H->KH"),
}
NAMES = parts.LLAMA | parts.NORM_BIASES | parts.QKV_BIASES | HEAD_NORMS


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' StableLmConfig."""
    norm = parts.layer_norm_config(raw, "layer_norm_eps")
    attention = parts.partial_rotary_attention_config(
        raw,
        fields.divided_head_size(raw),
        length=4096,
        share=0.25,
        kv_heads=32,
        bias=fields.flag(raw, "use_qkv_bias", False),
        qk_norm=NormKind("layer", norm.eps) if fields.flag(raw, "qk_layernorm", False) else None,
        qk_norm_over="each head",
    )
    return parts.model_config(
        raw,
        LayerKind(attention, parts.dense_ffn_config(raw)),
        max_position=4096,
        norm=norm,
        parallel="one norm" if fields.flag(raw, "use_parallel_residual", False) else None,
    )


FAMILY = Family(parse_config, NAMES)

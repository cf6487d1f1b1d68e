"""Stable LM (Bellagente et al., arXiv 2402.17834): Llama with layer norms that turns a part of each head; its
12B norms each head with a gain of its own, and both parts of a layer read one norm."""

from ...model.config import LayerKind, ModelConfig, NormKind
from . import fields, parts
from .family import Family
from .stored import Stored

HEAD_NORMS = {
    "layers.{}.attention.q_norm": Stored(parts.LAYER + "self_attn.q_layernorm.norms.{}.weight", "H->NH"),
    "layers.{}.attention.k_norm": Stored(parts.LAYER + "self_attn.k_layernorm.norms.{}.weight", "H->KH"),
}
NAMES = parts.LLAMA | parts.NORM_BIASES | parts.QKV_BIASES | HEAD_NORMS


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' StableLmConfig."""
    norm = parts.layer_norm(raw, "layer_norm_eps")
    attention = parts.partly_turned(
        raw,
        fields.divided_head_size(raw),
        length=4096,
        share=0.25,
        kv_heads=32,
        bias=fields.flag(raw, "use_qkv_bias", False),
        qk_norm=NormKind("layer", norm.eps) if fields.flag(raw, "qk_layernorm", False) else None,
        qk_norm_over="each head",
    )
    return parts.decoder(
        raw,
        LayerKind(attention, parts.dense(raw)),
        max_position=4096,
        norm=norm,
        parallel="one norm" if fields.flag(raw, "use_parallel_residual", False) else None,
    )


FAMILY = Family(config, NAMES, parts.IGNORED)

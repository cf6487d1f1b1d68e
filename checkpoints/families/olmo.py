"""OLMo 1 and 1.7 (Groeneveld et al., arXiv 2402.00838): Llama with layer norms that have neither gain nor
bias. OLMo 1.7 clips queries, keys and values."""

from ...model.config import LayerKind, ModelConfig, NormKind
from . import fields, parts
from .family import Family
from .ropes import read_rope

NAMES = {
    "embed": parts.OUTER_NAMES["embed"],
    "head": parts.OUTER_NAMES["head"],
    **(parts.ATTENTION | parts.BIASES | parts.FFN),
}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' OlmoConfig."""
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    clip = fields.number(raw, "clip_qkv", None)
    rope = read_rope(raw, size, length=2048)
    attention = parts.grouped_query_config(raw, rope, size, bias=bias, output_bias=bias, clip=clip)
    norm = NormKind("layer", gain=False)
    return parts.model_config(raw, LayerKind(attention, parts.dense_ffn_config(raw)), 2048, norm)


FAMILY = Family(parse_config, NAMES)

"""SmolLM3 (Bakouch et al., 2025): Llama without a rope on some layers (Yang et al., arXiv 2501.18795)."""

from ...model.config import LayerKind, ModelConfig
from ...refusals import quote
from . import fields, llama, parts
from .family import Family
from .ropes import read_rope


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' SmolLM3Config."""
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    rope, has_rope = read_rope(raw, size, length=32768, theta=2e6), rope_layers(raw)
    ffn = parts.dense_ffn_config(raw, bias=fields.flag(raw, "mlp_bias", False))
    kinds = {"kv_heads": 4, "bias": bias, "output_bias": bias}
    layers = [
        LayerKind(
            parts.grouped_query_config(raw, rope if rotates else None, size, window=window, **kinds), ffn
        )
        for rotates, window in zip(has_rope, windows(raw, has_rope), strict=True)
    ]
    return parts.model_config(raw, layers, max_position=32768, norm=parts.rms_norm_config(raw), tied=True)


def rope_layers(raw: fields.Raw) -> list[bool]:
    """Return True for each layer that has a rope.

    `no_rope_layers` has a 1 for these layers. By default every `no_rope_layer_interval`-th layer has none.
    """
    count, step = parts.num_layers(raw), fields.integer(raw, "no_rope_layer_interval", 4)
    flags = fields.value(raw, "no_rope_layers", [int((i + 1) % step > 0) for i in range(count)])
    if not isinstance(flags, list) or len(flags) < count or any(x not in (0, 1) for x in flags):
        raise ValueError(
            f"no_rope_layers is {quote(flags)}, expected a list of {count}, 1 or 0 for each layer"
        )
    return [bool(x) for x in flags[:count]]


def windows(raw: fields.Raw, has_rope: list[bool]) -> list[int | None]:
    """Return each layer's window. With `use_sliding_window`, layers without a rope have one."""
    used = fields.flag(raw, "use_sliding_window", False)
    window = fields.nullable(fields.integer, raw, "sliding_window", None) if used else None
    types = ["full_attention" if window is None or rotates else "sliding_attention" for rotates in has_rope]
    return parts.windows(raw, types, window)


FAMILY = Family(parse_config, llama.NAMES)

"""SmolLM3 (Bakouch et al., 2025): Llama with layers that do not turn queries and keys (Yang et al., arXiv
2501.18795)."""

from ...model.config import LayerKind, ModelConfig
from ...refusals import shown
from . import fields, llama, parts
from .family import Family
from .ropes import rope


def config(raw: fields.Raw) -> ModelConfig:
    """Absent fields have the defaults of transformers' SmolLM3Config."""
    size, bias = fields.head_size(raw), fields.flag(raw, "attention_bias", False)
    turn, turned = rope(raw, size, length=32768, theta=2e6), turns(raw)
    ffn = parts.dense(raw, bias=fields.flag(raw, "mlp_bias", False))
    kinds = {"kv_heads": 4, "bias": bias, "output_bias": bias}
    layers = [
        LayerKind(parts.grouped_query(raw, turn if here else None, size, window=window, **kinds), ffn)
        for here, window in zip(turned, windows(raw, turned), strict=True)
    ]
    return parts.decoder(raw, layers, max_position=32768, norm=parts.rms(raw), tied=True)


def turns(raw: fields.Raw) -> list[bool]:
    """Which layers turn queries and keys: those of a 1 in `no_rope_layers`, or else all but every
    `no_rope_layer_interval`-th."""
    count, step = parts.num_layers(raw), fields.integer(raw, "no_rope_layer_interval", 4)
    found = fields.value(raw, "no_rope_layers", [int((i + 1) % step > 0) for i in range(count)])
    if not isinstance(found, list) or len(found) < count or any(x not in (0, 1) for x in found):
        raise ValueError(
            f"no_rope_layers is {shown(found)}, expected a list of {count}, 1 or 0 for each layer"
        )
    return [bool(x) for x in found[:count]]


def windows(raw: fields.Raw, turned: list[bool]) -> list[int | None]:
    """With `use_sliding_window`, layers that do not turn have one."""
    used = fields.flag(raw, "use_sliding_window", False)
    window = fields.nullable(fields.integer, raw, "sliding_window", None) if used else None
    types = ["full_attention" if window is None or here else "sliding_attention" for here in turned]
    return parts.windows(raw, types, window)


FAMILY = Family(config, llama.NAMES, parts.IGNORED)

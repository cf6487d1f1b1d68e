"""Qwen 1.5's and 2's mixtures of experts (Yang et al., arXiv 2407.10671), with a shared expert that has a
gate."""

from dataclasses import replace

from ...model.config import Dense, Experts, LayerKind, ModelConfig
from . import fields, parts, qwen3_moe
from .family import Family
from .ropes import read_rope
from .storage import Stored

SHARED = parts.gated_ffn_names("ffn.shared", "mlp.shared_expert") | {
    "layers.{}.ffn.shared.output_gate": Stored(parts.LAYER + "mlp.shared_expert_gate.weight", "1,D->D")
}
NAMES = (
    parts.LLAMA | parts.QKV_BIASES | parts.expert_names("mlp", "gate_proj", "up_proj", "down_proj") | SHARED
)
DEFAULTS = {"num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408}


def parse_config(raw: fields.Raw) -> ModelConfig:
    """Read the fields of a `config.json`. Absent ones have the defaults of transformers' Qwen2MoeConfig."""
    size, bias = fields.head_size(raw), fields.flag(raw, "qkv_bias", True)
    rope, shared = (
        read_rope(raw, size, length=32768),
        fields.integer(raw, "shared_expert_intermediate_size", 5632),
    )
    layers = [
        LayerKind(
            parts.grouped_query_config(raw, rope, size, kv_heads=16, window=window, bias=bias),
            with_shared_expert(ffn, shared),
        )
        for window, ffn in zip(windows(raw), qwen3_moe.ffn_configs(DEFAULTS | drop_nulls(raw)), strict=True)
    ]
    return parts.model_config(raw, layers, max_position=32768, norm=parts.rms_norm_config(raw))


def windows(raw: fields.Raw) -> list[int | None]:
    """Return each layer's window.

    With `use_sliding_window`, every second one of the first `max_window_layers` layers has one.
    """
    used, count = (
        fields.flag(raw, "use_sliding_window", False),
        fields.non_negative_integer(raw, "max_window_layers", 28),
    )
    window = fields.nullable(fields.integer, raw, "sliding_window", 4096) if used else None
    types = [
        "sliding_attention" if window is not None and i < count and i % 2 == 0 else "full_attention"
        for i in range(parts.num_layers(raw))
    ]
    return parts.windows(raw, types, window)


def drop_nulls(raw: fields.Raw) -> dict:
    """Return the fields that are not null."""
    return {name: value for name, value in raw.items() if value is not None}


def with_shared_expert(ffn: Dense | Experts, size: int) -> Dense | Experts:
    """Return a mixture with a shared expert of `size` and its gate; dense layers are returned unchanged."""
    return replace(ffn, shared=size, shared_gate=True) if isinstance(ffn, Experts) else ffn


FAMILY = Family(parse_config, NAMES)

"""Rotary embeddings of a `config.json` in both styles: `rope_theta` beside `rope_scaling`, or
`rope_parameters`."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...model.rope import Rope
from ...refusals import quote
from .fields import REQUIRED, Raw, allow_only, flag, integer, number, numbers, value

ROPE_FIELDS = ("rope_scaling", "rope_parameters")  # fields that state a rope; the first one present counts
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "longrope")
MAX_MSCALE = 1e3  # limit of the weight of YaRN's correction of scores; models have at most 1


def read_rope(raw: Raw, size: int, *, length: int, theta: float = 10000.0, partial: bool = False) -> Rope:
    """Read the one rope of all layers, for `size` dimensions of a head.

    length, theta: the family's defaults of `max_position_embeddings` and `rope_theta`.
    partial: the family may rotate a part of each head.
    """
    for name in ("rope_parameters", "rope_scaling"):
        stated = value(raw, name, {})
        if not isinstance(stated, Mapping) or is_by_layer_type(stated):
            raise ValueError(f"{name} is {quote(stated)}, expected one flat object for all layers")
    require_rope_type(raw)
    name, stated = find_rope(raw)
    if not partial:
        allow_only(raw, "partial_rotary_factor", 1)
        allow_only(stated, "partial_rotary_factor", 1)
    beside = {**raw, "max_position_embeddings": integer(raw, "max_position_embeddings", length)}
    return parse_rope(beside, stated, name, size, number(raw, "rope_theta", theta))


def find_rope(raw: Raw) -> tuple[str, Any]:
    """Return the name and the value of the field that states the rope; the value is {} if none does."""
    name = next((name for name in ROPE_FIELDS if raw.get(name)), ROPE_FIELDS[-1])
    return name, value(raw, name, {})


def is_by_layer_type(rope: Mapping[str, Any]) -> bool:
    """Return True if an object holds a rope for each type of layers."""
    return any(isinstance(value, Mapping) for value in rope.values())


def read_rope_pair(raw: Raw, size: int, length: int, thetas: tuple[float, float]) -> tuple[Rope, Rope]:
    """Read the ropes of layers without and with a window.

    thetas: defaults of both bases; `rope_scaling` changes the former only.
    """
    allow_only(raw, "partial_rotary_factor", 1)
    stated = value(raw, "rope_parameters", {})
    if not isinstance(stated, Mapping) or set(stated) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"rope_parameters is {quote(stated)}, expected objects for full_attention and sliding_attention"
        )
    ropes = (*stated.values(), raw.get("rope_scaling"))
    if odd := [part for part in ropes if not isinstance(part, Mapping | None)]:
        raise ValueError(f"the rope of a layer type is {quote(odd[0])}, expected an object")
    for part in stated.values():
        allow_only(part or {}, "partial_rotary_factor", 1)
    require_rope_type(raw)
    full = {**(stated.get("full_attention") or {}), **value(raw, "rope_scaling", {})}
    local = stated.get("sliding_attention") or {}
    beside = {"max_position_embeddings": integer(raw, "max_position_embeddings", length)}
    return (
        parse_rope(beside, full, "rope of full_attention", size, thetas[0]),
        parse_rope(beside, local, "rope of sliding_attention", size, thetas[1]),
    )


def read_ropes_by_type(
    raw: Raw, size: int, length: int, defaults: Mapping[str, Mapping[str, Any]]
) -> dict[str, tuple[Rope, int]]:
    """Return the rope of each type of layers, and how many of `size` dimensions of a head it rotates.

    `rope_parameters` has an object for each type; `defaults` are the family's.
    """
    allow_only(raw, "rope_scaling")
    stated = value(raw, "rope_parameters", defaults)
    objects = stated.values() if isinstance(stated, Mapping) else [None]
    if not all(isinstance(part, Mapping) for part in objects) or set(stated) - set(defaults):
        expected = " and ".join(defaults)
        raise ValueError(f"rope_parameters is {quote(stated)}, expected objects for {expected}")
    beside, ropes = {"max_position_embeddings": integer(raw, "max_position_embeddings", length)}, {}
    for kind, default in defaults.items():
        part = stated.get(kind, default)
        rotated = rotary_size({"rope_parameters": part}, size, 1.0)
        theta = default["rope_theta"]
        ropes[kind] = parse_rope(beside, part, f"rope of {kind}", rotated, theta), rotated
    return ropes


def rotary_size(raw: Raw, size: int, default: float = 1.0) -> int:
    """Return how many dimensions of a head are rotated: a share of `size`, rounded down."""
    stated = find_rope(raw)[1]
    share = number(raw, "partial_rotary_factor", default)
    if isinstance(stated, Mapping):
        share = number(stated, "partial_rotary_factor", share)
    if share > 1:
        raise ValueError(f"partial_rotary_factor is {share}, expected at most 1")
    if int(size * share) < 2:
        raise ValueError(f"partial_rotary_factor is {share}, too little of {size} dimensions")
    return int(size * share)


def require_rope_type(raw: Raw) -> None:
    """Raise ValueError for a `rope_scaling` that does not state its kind."""
    stated = value(raw, "rope_scaling", {})
    if stated and stated.get("rope_type") is None and stated.get("type") is None:
        raise ValueError(f"rope_scaling: rope_type is missing in {quote(stated)}")


def parse_rope(raw: Raw, stated: Raw, name: str, size: int, theta: float) -> Rope:
    """Return the rope that one flat object states; its kind is `rope_type`, or `type` in older files.

    raw: fields beside the object. The length in training is `original_max_position_embeddings` there, or else
    in the object, or else the model's.
    name: what errors call the object.
    """
    length = integer(raw, "max_position_embeddings")
    try:
        original = integer(stated, "original_max_position_embeddings", length)
        original = integer(raw, "original_max_position_embeddings", original)
        kind = value(stated, "rope_type", value(stated, "type", "default"))
        rope = Rope(number(stated, "rope_theta", theta), original_max_position=original)
        if kind == "dynamic" and stated.get("alpha") is not None:  # Hunyuan: alpha changes the base
            rope = replace(rope, theta=rope.theta * number(stated, "alpha") ** (size / (size - 2)))
        elif kind == "dynamic":
            raise ValueError("rope_type is 'dynamic', which is supported with an alpha only")
        if kind in ("default", "dynamic", "mrope"):  # mrope: three positions, which are equal for text
            return replace(rope, original_max_position=Rope().original_max_position)
        if kind == "linear":
            return Rope(rope.theta, "linear", number(stated, "factor"))
        if kind == "llama3":
            return parse_llama3_rope(rope, stated)
        if kind == "yarn":
            return parse_yarn_rope(rope, stated, length)
        if kind == "longrope":
            return parse_longrope(rope, stated, length, size)
    except ValueError as e:
        raise ValueError(f"{name}: {e}") from e
    expected = ", ".join(map(repr, ROPE_KINDS))
    raise ValueError(
        f"{name}: rope_type is {quote(kind)}, which is not supported: expected one of {expected}"
    )


def parse_llama3_rope(rope: Rope, stated: Raw) -> Rope:
    """Return the rope of Llama 3.1: low frequencies are divided by `factor`."""
    low, high = number(stated, "low_freq_factor"), number(stated, "high_freq_factor")
    if high <= low:
        raise ValueError(f"high_freq_factor is {high}, expected more than low_freq_factor {low}")
    return replace(
        rope, kind="llama3", factor=number(stated, "factor"), low_freq_factor=low, high_freq_factor=high
    )


def parse_yarn_rope(rope: Rope, stated: Raw, length: int) -> Rope:
    """Return a YaRN rope (arXiv 2309.00071). For weights of the blend and the scale, 0 means absence."""
    if rope.theta <= 1:
        raise ValueError(f"rope_theta is {rope.theta}, expected more than 1")
    betas = {name: stated[name] for name in ("beta_fast", "beta_slow") if stated.get(name)}
    factor = rope_scaling_factor(stated, length / rope.original_max_position, REQUIRED)
    return replace(
        rope,
        kind="yarn",
        factor=factor,
        beta_fast=number(betas, "beta_fast", 32.0),
        beta_slow=number(betas, "beta_slow", 1.0),
        truncate=flag(stated, "truncate", True),
        scale=number(stated, "attention_factor", yarn_attention_factor(stated, factor)),
    )


def yarn_attention_factor(stated: Raw, factor: float) -> float:
    """Return the factor of cosine and sine: with both of DeepSeek's fields, their quotient.

    The rest of DeepSeek's correction multiplies the scores (`latent_score_scale`).
    """
    if stated.get("mscale") and stated.get("mscale_all_dim"):
        return read_mscale(stated, factor, "mscale") / read_mscale(stated, factor, "mscale_all_dim")
    return yarn_mscale(factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """Return YaRN's correction of scores over a context `factor` times as long (arXiv 2309.00071, equation
    22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def read_mscale(stated: Raw, factor: float, name: str) -> float:
    """Return the correction of scores with the weight in the field `name`."""
    return yarn_mscale(factor, number(stated, name, maximum=MAX_MSCALE))


def latent_score_scale(raw: Raw) -> float:
    """Return the factor of all scores of latent attention, from DeepSeek's `mscale_all_dim`."""
    stated = find_rope(raw)[1]
    kind = value(stated, "rope_type", value(stated, "type", "default"))
    if kind == "default" or not stated.get("mscale_all_dim"):
        return 1.0
    return read_mscale(stated, number(stated, "factor"), "mscale_all_dim") ** 2


def parse_longrope(rope: Rope, stated: Raw, length: int, size: int) -> Rope:
    """Return a LongRoPE rope: each pair of dimensions has a factor for short and for long contexts."""
    for name in ("short_mscale", "long_mscale"):
        allow_only(stated, name)
    original = rope.original_max_position
    if original < 2:
        raise ValueError(f"original_max_position_embeddings is {original}, expected more than 1")
    factor = rope_scaling_factor(stated, length / original, None)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return replace(
        rope,
        kind="longrope",
        factor=factor,
        short_factors=numbers(stated, "short_factor", size // 2),
        long_factors=numbers(stated, "long_factor", size // 2),
        scale=number(stated, "attention_factor", scale),
    )


def rope_scaling_factor(stated: Raw, by_length: float, absent: Any) -> float:
    """Return `factor`, or else how many times the context is longer than in training."""
    return number(stated, "factor", absent if "factor" not in stated and absent is REQUIRED else by_length)


def export_rope(rope: Rope) -> dict[str, Any] | None:
    """Return the field `rope_scaling` that states a rope, beside `rope_theta`. Inverse of `parse_rope`."""
    if rope.kind == "default":
        return None
    stated: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "linear":
        return stated
    stated["original_max_position_embeddings"] = rope.original_max_position
    if rope.kind == "llama3":
        return stated | {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    stated["attention_factor"] = rope.scale
    if rope.kind == "yarn":
        names = ("beta_fast", "beta_slow", "truncate")
        return stated | {name: getattr(rope, name) for name in names}
    return stated | {"short_factor": list(rope.short_factors), "long_factor": list(rope.long_factors)}

"""Rotary embeddings of a `config.json` in both styles: `rope_theta` beside `rope_scaling`, or all in
`rope_parameters`."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...model.rope import Rope
from ...refusals import shown
from .fields import REQUIRED, Raw, flag, integer, number, numbers, only, value

KINDS = ("default", "linear", "llama3", "yarn", "longrope")
MAX_MAGNITUDE = 1e3  # of what multiplies YaRN's correction of scores; models have 1 and less


def rope(raw: Raw, size: int, *, length: int, theta: float = 10000.0, partial: bool = False) -> Rope:
    """The one rope of all layers, for `size` dimensions of a head.

    `length` and `theta` are the family's defaults of `max_position_embeddings` and `rope_theta`; only
    families for which `partial` is given may turn a part of a head.
    """
    for name in ("rope_parameters", "rope_scaling"):
        found = value(raw, name, {})
        if not isinstance(found, Mapping) or any(isinstance(v, Mapping) for v in found.values()):
            raise ValueError(f"{name} is {shown(found)}, expected one flat object for all layers")
    require_kind(raw)
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    found = value(raw, name, {})
    if not partial:
        only(raw, "partial_rotary_factor", 1)
        only(found, "partial_rotary_factor", 1)
    beside = {**raw, "max_position_embeddings": integer(raw, "max_position_embeddings", length)}
    return scaled(beside, found, name, size, number(raw, "rope_theta", theta))


def two_ropes(raw: Raw, size: int, length: int, thetas: tuple[float, float]) -> tuple[Rope, Rope]:
    """Ropes of layers without and with a window. `thetas`: their defaults where `rope_parameters` has none;
    `rope_scaling` is for the former only."""
    only(raw, "partial_rotary_factor", 1)
    both = value(raw, "rope_parameters", {})
    if not isinstance(both, Mapping) or set(both) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"rope_parameters is {shown(both)}, expected objects for full_attention and sliding_attention"
        )
    parts_given = (*both.values(), raw.get("rope_scaling"))
    if odd := [part for part in parts_given if not isinstance(part, Mapping | None)]:
        raise ValueError(f"the rope of a layer type is {shown(odd[0])}, expected an object")
    require_kind(raw)
    whole = {**(both.get("full_attention") or {}), **value(raw, "rope_scaling", {})}
    local = both.get("sliding_attention") or {}
    beside = {"max_position_embeddings": integer(raw, "max_position_embeddings", length)}
    return (
        scaled(beside, whole, "rope of full_attention", size, thetas[0]),
        scaled(beside, local, "rope of sliding_attention", size, thetas[1]),
    )


def rotary_size(raw: Raw, size: int, default: float = 1.0) -> int:
    """Number of a head's dimensions that are rotated: a share of them, rounded down."""
    stated = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    share = number(raw, "partial_rotary_factor", default)
    if isinstance(stated, Mapping):
        share = number(stated, "partial_rotary_factor", share)
    if share > 1:
        raise ValueError(f"partial_rotary_factor is {share}, expected at most 1")
    if int(size * share) < 2:
        raise ValueError(f"partial_rotary_factor is {share}, too little of {size} dimensions")
    return int(size * share)


def require_kind(raw: Raw) -> None:
    """Refuse a `rope_scaling` that says something, but not what kind it is."""
    found = value(raw, "rope_scaling", {})
    if found and found.get("rope_type") is None and found.get("type") is None:
        raise ValueError(f"rope_scaling: rope_type is missing in {shown(found)}")


def scaled(raw: Raw, found: Raw, name: str, size: int, theta: float) -> Rope:
    """A rope as one flat object says, which errors call `name`; its kind is its `rope_type` or, in older
    files, `type`.

    The length of the training is `original_max_position_embeddings`, beside the object or else in it, or the
    model's.
    """
    length = integer(raw, "max_position_embeddings")
    try:
        original = integer(found, "original_max_position_embeddings", length)
        original = integer(raw, "original_max_position_embeddings", original)
        kind = value(found, "rope_type", value(found, "type", "default"))
        plain = Rope(number(found, "rope_theta", theta), original_max_position=original)
        if kind == "dynamic" and found.get("alpha") is not None:  # Hunyuan's: a base of its own
            plain = replace(plain, theta=plain.theta * number(found, "alpha") ** (size / (size - 2)))
        elif kind == "dynamic":
            raise ValueError("rope_type is 'dynamic', which is supported with an alpha only")
        if kind in ("default", "dynamic"):
            return replace(plain, original_max_position=Rope().original_max_position)
        if kind == "linear":
            return Rope(plain.theta, "linear", number(found, "factor"))
        if kind == "llama3":
            return llama3(plain, found)
        if kind == "yarn":
            return yarn(plain, found, length)
        if kind == "longrope":
            return longrope(plain, found, length, size)
    except ValueError as e:
        raise ValueError(f"{name}: {e}") from e
    expected = ", ".join(map(repr, KINDS))
    raise ValueError(
        f"{name}: rope_type is {shown(kind)}, which is not supported: expected one of {expected}"
    )


def llama3(plain: Rope, found: Raw) -> Rope:
    low, high = number(found, "low_freq_factor"), number(found, "high_freq_factor")
    if high <= low:
        raise ValueError(f"high_freq_factor is {high}, expected more than low_freq_factor {low}")
    return replace(
        plain, kind="llama3", factor=number(found, "factor"), low_freq_factor=low, high_freq_factor=high
    )


def yarn(plain: Rope, found: Raw, length: int) -> Rope:
    """Zero says the same as absence for what weighs the blend and the scale."""
    if plain.theta <= 1:
        raise ValueError(f"rope_theta is {plain.theta}, expected more than 1")
    stated = {name: found[name] for name in ("beta_fast", "beta_slow") if found.get(name)}
    factor = stretch(found, length / plain.original_max_position, REQUIRED)
    return replace(
        plain,
        kind="yarn",
        factor=factor,
        beta_fast=number(stated, "beta_fast", 32.0),
        beta_slow=number(stated, "beta_slow", 1.0),
        truncate=flag(found, "truncate", True),
        scale=number(found, "attention_factor", yarn_scale(found, factor)),
    )


def yarn_scale(found: Raw, factor: float) -> float:
    """Factor of cosine and sine. With both of DeepSeek's fields it is their quotient; the rest goes into the
    scores."""
    if found.get("mscale") and found.get("mscale_all_dim"):
        return weighted(found, factor, "mscale") / weighted(found, factor, "mscale_all_dim")
    return magnitude(factor, 1.0)


def magnitude(factor: float, weight: float) -> float:
    """YaRN's correction of scores over a context that is `factor` times as long (arXiv 2309.00071, equation
    22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def weighted(found: Raw, factor: float, name: str) -> float:
    return magnitude(factor, number(found, name, most=MAX_MAGNITUDE))


def latent_magnitude(raw: Raw) -> float:
    """Factor of all scores of latent attention, from DeepSeek's `mscale_all_dim`."""
    found = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = value(found, "rope_type", value(found, "type", "default"))
    if kind == "default" or not found.get("mscale_all_dim"):
        return 1.0
    return weighted(found, number(found, "factor"), "mscale_all_dim") ** 2


def longrope(plain: Rope, found: Raw, length: int, size: int) -> Rope:
    for name in ("short_mscale", "long_mscale"):
        only(found, name)
    original = plain.original_max_position
    if original < 2:
        raise ValueError(f"original_max_position_embeddings is {original}, expected more than 1")
    factor = stretch(found, length / original, None)
    scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return replace(
        plain,
        kind="longrope",
        factor=factor,
        short_factors=numbers(found, "short_factor", size // 2),
        long_factors=numbers(found, "long_factor", size // 2),
        scale=number(found, "attention_factor", scale),
    )


def stretch(found: Raw, by_length: float, absent: Any) -> float:
    """`factor`, or how much longer than in training the context is."""
    return number(found, "factor", absent if "factor" not in found and absent is REQUIRED else by_length)


def rope_scaling(rope: Rope) -> dict[str, Any] | None:
    """A rope read backwards: the field `rope_scaling` that stands beside `rope_theta`."""
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

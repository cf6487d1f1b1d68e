"""Fields of a `config.json`, read with their types and limits: each raises ValueError with the field and its value."""

import sys
from collections.abc import Mapping
from typing import Any

from ...model.config import Rope

Raw = Mapping[str, Any]
REQUIRED = object()


def shown(found: Any) -> str:
    """A value as an error quotes it."""
    text = repr(found)
    return text if len(text) <= 80 else text[:77] + "..."


def value(raw: Raw, name: str, default: Any) -> Any:
    """A field's value; a field that is absent or null has the default, unless it is REQUIRED."""
    found = raw.get(name)
    if found is not None:
        return found
    if default is REQUIRED:
        raise ValueError(f"{name} is missing")
    return default


def integer(raw: Raw, name: str, default: Any = REQUIRED) -> Any:
    """A positive integer, or the default."""
    found = value(raw, name, default)
    if found is not default and (type(found) is not int or found < 1):
        raise ValueError(f"{name} is {shown(found)}, expected a positive integer")
    return found


def number(raw: Raw, name: str, default: Any = REQUIRED) -> Any:
    """A finite number above zero as a float, or the default."""
    found = value(raw, name, default)
    if found is default:
        return default
    if type(found) not in (int, float) or not 0 < found <= sys.float_info.max:
        raise ValueError(f"{name} is {shown(found)}, expected a number above 0")
    return float(found)


def flag(raw: Raw, name: str, default: bool) -> bool:
    found = value(raw, name, default)
    if type(found) is not bool:
        raise ValueError(f"{name} is {shown(found)}, expected true or false")
    return found


def only(raw: Raw, name: str, *allowed: Any) -> None:
    """Refuse every value of a field but those allowed; absent and null always are."""
    found = raw.get(name)
    if found is not None and found not in allowed:
        expected = " or ".join(map(repr, allowed)) or "null"
        raise ValueError(f"{name} is {shown(found)}, which is not supported: expected {expected}")


def head_size(raw: Raw) -> int:
    """`head_dim`, or else the model's width divided among its heads."""
    found = integer(raw, "head_dim", None)
    if found is not None:
        return found
    hidden, heads = integer(raw, "hidden_size"), integer(raw, "num_attention_heads")
    if hidden % heads:
        raise ValueError(f"head_dim is missing and hidden_size {hidden} is not a multiple of {heads} heads")
    return hidden // heads


def rope(raw: Raw, max_position: int) -> Rope:
    """Rotary embeddings in both styles: `rope_theta` beside `rope_scaling`, or all of it in `rope_parameters`."""
    only(raw, "partial_rotary_factor", 1)
    name = "rope_parameters" if raw.get("rope_scaling") in (None, {}) else "rope_scaling"
    found = value(raw, name, {})
    if not isinstance(found, Mapping) or any(isinstance(v, Mapping) for v in found.values()):
        raise ValueError(f"{name} is {shown(found)}, expected one flat object for all layers")
    theta = number(raw, "rope_theta", 10000.0)
    length = integer(raw, "original_max_position_embeddings", None)
    try:
        length = length or integer(found, "original_max_position_embeddings", max_position)
        return scaled_rope(found, number(found, "rope_theta", theta), length)
    except ValueError as e:
        raise ValueError(f"{name}: {e}") from e


def scaled_rope(found: Raw, theta: float, original_max_position: int) -> Rope:
    """Rotary embeddings as one flat object says, its kind named by `rope_type` or, in older files, `type`."""
    only(found, "partial_rotary_factor", 1)
    kind = value(found, "rope_type", value(found, "type", "default"))
    if kind == "default":
        return Rope(theta)
    if kind == "linear":
        return Rope(theta, "linear", number(found, "factor"))
    if kind != "llama3":
        raise ValueError(
            f"rope_type is {shown(kind)}, which is not supported: expected 'default', 'linear' or 'llama3'"
        )
    low, high = number(found, "low_freq_factor"), number(found, "high_freq_factor")
    if high <= low:
        raise ValueError(f"high_freq_factor is {high}, expected more than low_freq_factor {low}")
    return Rope(theta, "llama3", number(found, "factor"), low, high, original_max_position)


def rope_scaling(rope: Rope) -> dict[str, Any] | None:
    """`rope` read backwards: the field `rope_scaling` that stands beside `rope_theta`."""
    if rope.kind == "default":
        return None
    if rope.kind == "linear":
        return {"rope_type": "linear", "factor": rope.factor}
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position,
    }

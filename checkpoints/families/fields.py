"""Fields of a `config.json`, read with their types and limits. Each function raises ValueError with field and
value."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...model.config import Activation
from ...refusals import quote

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
ATTENTION_TYPES = ("full_attention", "sliding_attention")
Raw = Mapping[str, Any]
REQUIRED = object()
MAX_COUNT = 2**31 - 1
MAX_LAYERS, MAX_EXPERTS = 10_000, 100_000
MIN_NUMBER, MAX_NUMBER = 1e-30, 1e30  # products and powers of such numbers stay finite


def value(raw: Raw, name: str, default: Any) -> Any:
    """Return a field's value. A field that is absent or null has the default, unless it is REQUIRED."""
    stated = raw.get(name)
    if stated is not None:
        return stated
    if default is REQUIRED:
        raise ValueError(f"{name} is missing")
    return default


def present_name(raw: Raw, *names: str) -> str:
    """Return the first of a field's names that has a value, or else the first name."""
    return next((name for name in names if raw.get(name) is not None), names[0])


def section(raw: Raw, name: str) -> Raw:
    """Return a field that is an object of fields; an absent one has none."""
    stated = value(raw, name, {})
    if isinstance(stated, Mapping):
        return stated
    raise ValueError(f"{name} is {quote(stated)}, expected an object")


def nullable(read: Callable[[Raw, str], Any], raw: Raw, name: str, default: Any) -> Any:
    """Return a field for which null and absence differ: None for null, the default for absence."""
    if name in raw:
        return None if raw[name] is None else read(raw, name)
    return value(raw, name, default)


def integer(raw: Raw, name: str, default: Any = REQUIRED, maximum: int = MAX_COUNT) -> Any:
    """Return a positive integer up to `maximum`, or the default."""
    stated = value(raw, name, default)
    if stated is not default and (type(stated) is not int or not 1 <= stated <= maximum):
        raise ValueError(f"{name} is {quote(stated)}, expected a positive integer, at most {maximum}")
    return stated


def layer_count(raw: Raw, name: str, default: Any = REQUIRED) -> Any:
    """Return a number of layers, or the default."""
    return integer(raw, name, default, MAX_LAYERS)


def with_common_names(raw: Raw, names: Mapping[str, tuple[str, int]]) -> dict[str, Any]:
    """Return the fields with integers under the names that families have in common.

    names: the family's own name, and the default, by the common name, which counts before the former, as in
        transformers.
    """
    limits = {"num_hidden_layers": MAX_LAYERS}
    stated = {
        common: integer(raw, present_name(raw, common, own), default, limits.get(common, MAX_COUNT))
        for common, (own, default) in names.items()
    }
    return {**raw, **stated}


def expert_count(raw: Raw, name: str, default: Any = REQUIRED) -> Any:
    """Return a number of experts, or the default."""
    return integer(raw, name, default, MAX_EXPERTS)


def non_negative_integer(raw: Raw, name: str, default: Any = REQUIRED) -> int:
    """Return an integer that may be 0, or the default."""
    stated = value(raw, name, default)
    if type(stated) is not int or not 0 <= stated <= MAX_COUNT:
        raise ValueError(f"{name} is {quote(stated)}, expected an integer, 0 to {MAX_COUNT}")
    return stated


def number(raw: Raw, name: str, default: Any = REQUIRED, maximum: float = MAX_NUMBER) -> Any:
    """Return a number above 0 and up to `maximum`, as a float, or the default."""
    stated = value(raw, name, default)
    if stated is default:
        return default
    if type(stated) not in (int, float) or not MIN_NUMBER <= stated <= maximum:
        raise ValueError(
            f"{name} is {quote(stated)}, expected a number above 0: {MIN_NUMBER:g} to {maximum:g}"
        )
    return float(stated)


def numbers(raw: Raw, name: str, count: int, default: Any = REQUIRED) -> tuple[float, ...]:
    """Return a list of `count` numbers above 0."""
    stated = value(raw, name, default)
    if not isinstance(stated, list) or len(stated) != count:
        raise ValueError(f"{name} is {quote(stated)}, expected a list of {count} numbers")
    return tuple(number({name: x}, name) for x in stated)


def layer_indices(raw: Raw, name: str, default: Iterable[int]) -> list[int]:
    """Return a list of layer numbers."""
    stated = value(raw, name, list(default))
    if not isinstance(stated, list) or any(type(i) is not int for i in stated):
        raise ValueError(f"{name} is {quote(stated)}, expected a list of layers' numbers")
    return stated


def integers_by_layer(raw: Raw, name: str, layers: int, default: Any = REQUIRED) -> list[int]:
    """Return a positive integer for each of the `layers`: a list of them, or one for all."""
    stated = value(raw, name, default)
    if not isinstance(stated, list):
        return [integer(raw, name, default)] * layers
    if len(stated) != layers:
        raise ValueError(f"{name} is {quote(stated)}, expected a list of {layers}, one for each layer")
    return [integer({name: x}, name) for x in stated]


def flag(raw: Raw, name: str, default: bool) -> bool:
    """Return a field that is true or false."""
    stated = value(raw, name, default)
    if type(stated) is not bool:
        raise ValueError(f"{name} is {quote(stated)}, expected true or false")
    return stated


def allow_only(raw: Raw, name: str, *allowed: Any) -> None:
    """Raise ValueError unless a field has one of the allowed values, or is absent or null."""
    stated = raw.get(name)
    if stated is not None and stated not in allowed:
        expected = " or ".join(map(repr, allowed)) or "null"
        raise ValueError(f"{name} is {quote(stated)}, which is not supported: expected {expected}")


def enum_value(raw: Raw, name: str, default: str, meanings: Mapping[str, Any]) -> Any:
    """Return the meaning of a field's word, by a table of `meanings`."""
    stated = value(raw, name, default)
    if not isinstance(stated, str) or stated not in meanings:
        expected = ", ".join(map(repr, meanings))
        raise ValueError(f"{name} is {quote(stated)}, which is not supported: expected one of {expected}")
    return meanings[stated]


def activation(raw: Raw, name: str, default: str) -> Activation:
    """Return an activation by its name in transformers."""
    return enum_value(raw, name, default, ACTIVATIONS)


def layer_types(
    raw: Raw, default: list[str], known: tuple[str, ...] = ATTENTION_TYPES, name: str = "layer_types"
) -> list[str]:
    """Return the type of each layer: `layer_types`, or else `default`. Each is one of the `known` types."""
    types = value(raw, name, default)
    if not isinstance(types, list) or len(types) != len(default):
        raise ValueError(f"{name} is {quote(types)}, expected a list of {len(default)}, one for each layer")
    for kind in types:
        if kind not in known:
            raise ValueError(
                f"{name} holds {quote(kind)}, which is not supported: "
                f"expected {' or '.join(map(repr, known))}"
            )
    return types


def head_size(raw: Raw, default: int | None = None) -> int:
    """Return the size of a head: `head_dim`, or else `default`, or else the model's width divided by its
    heads."""
    size = integer(raw, "head_dim", default)
    if size is not None:
        return size
    hidden, heads = integer(raw, "hidden_size"), integer(raw, "num_attention_heads")
    if hidden % heads:
        raise ValueError(f"head_dim is missing and hidden_size {hidden} is not a multiple of {heads} heads")
    return hidden // heads


def divided_head_size(raw: Raw) -> int:
    """Return the model's width divided by its heads. Raises ValueError for another `head_dim`."""
    size = head_size({**raw, "head_dim": None})
    allow_only(raw, "head_dim", size)
    return size

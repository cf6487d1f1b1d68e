"""Fields of a `config.json`, read with their types and limits: each raises ValueError with the field and its
value."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...model.config import Activation
from ...refusals import shown

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
ATTENTIONS = ("full_attention", "sliding_attention")
Raw = Mapping[str, Any]
REQUIRED = object()
MAX_COUNT = 2**31 - 1
MAX_LAYERS, MAX_EXPERTS = 10_000, 100_000
MIN_NUMBER, MAX_NUMBER = 1e-30, 1e30  # their products and powers stay finite


def value(raw: Raw, name: str, default: Any) -> Any:
    """A field's value; a field that is absent or null has the default, unless it is REQUIRED."""
    found = raw.get(name)
    if found is not None:
        return found
    if default is REQUIRED:
        raise ValueError(f"{name} is missing")
    return default


def named(raw: Raw, *names: str) -> str:
    """The first of a field's names that has a value, or else the first."""
    return next((name for name in names if raw.get(name) is not None), names[0])


def nullable(read: Callable[[Raw, str], Any], raw: Raw, name: str, default: Any) -> Any:
    """A field for which null says something else than absence: None is null, the default is for a field that
    is absent."""
    if name in raw:
        return None if raw[name] is None else read(raw, name)
    return value(raw, name, default)


def integer(raw: Raw, name: str, default: Any = REQUIRED, most: int = MAX_COUNT) -> Any:
    """A positive integer, or the default."""
    found = value(raw, name, default)
    if found is not default and (type(found) is not int or not 1 <= found <= most):
        raise ValueError(f"{name} is {shown(found)}, expected a positive integer, at most {most}")
    return found


def layers(raw: Raw, name: str, default: Any = REQUIRED) -> Any:
    return integer(raw, name, default, MAX_LAYERS)


def experts(raw: Raw, name: str, default: Any = REQUIRED) -> Any:
    return integer(raw, name, default, MAX_EXPERTS)


def count(raw: Raw, name: str, default: Any = REQUIRED) -> int:
    """An integer that may be 0, or the default."""
    found = value(raw, name, default)
    if type(found) is not int or not 0 <= found <= MAX_COUNT:
        raise ValueError(f"{name} is {shown(found)}, expected an integer, 0 to {MAX_COUNT}")
    return found


def number(raw: Raw, name: str, default: Any = REQUIRED, most: float = MAX_NUMBER) -> Any:
    """A number above zero as a float, or the default."""
    found = value(raw, name, default)
    if found is default:
        return default
    if type(found) not in (int, float) or not MIN_NUMBER <= found <= most:
        raise ValueError(f"{name} is {shown(found)}, expected a number above 0: {MIN_NUMBER:g} to {most:g}")
    return float(found)


def numbers(raw: Raw, name: str, count: int, default: Any = REQUIRED) -> tuple[float, ...]:
    """A list of `count` numbers above zero."""
    found = value(raw, name, default)
    if not isinstance(found, list) or len(found) != count:
        raise ValueError(f"{name} is {shown(found)}, expected a list of {count} numbers")
    return tuple(number({name: x}, name) for x in found)


def indices(raw: Raw, name: str, default: Iterable[int]) -> list[int]:
    """A list of layers' numbers."""
    found = value(raw, name, list(default))
    if not isinstance(found, list) or any(type(i) is not int for i in found):
        raise ValueError(f"{name} is {shown(found)}, expected a list of layers' numbers")
    return found


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


def chosen(raw: Raw, name: str, default: str, meanings: Mapping[str, Any]) -> Any:
    """The value that a known word stands for."""
    found = value(raw, name, default)
    if not isinstance(found, str) or found not in meanings:
        expected = ", ".join(map(repr, meanings))
        raise ValueError(f"{name} is {shown(found)}, which is not supported: expected one of {expected}")
    return meanings[found]


def activation(raw: Raw, name: str, default: str) -> Activation:
    return chosen(raw, name, default, ACTIVATIONS)


def layer_types(
    raw: Raw, default: list[str], known: tuple[str, ...] = ATTENTIONS, name: str = "layer_types"
) -> list[str]:
    """`layer_types`, one for each layer and each of the `known` ones, or else those that other fields make of
    each."""
    found = value(raw, name, default)
    if not isinstance(found, list) or len(found) != len(default):
        raise ValueError(f"{name} is {shown(found)}, expected a list of {len(default)}, one for each layer")
    for kind in found:
        if kind not in known:
            raise ValueError(
                f"{name} holds {shown(kind)}, which is not supported: "
                f"expected {' or '.join(map(repr, known))}"
            )
    return found


def head_size(raw: Raw, default: int | None = None) -> int:
    """`head_dim`, or else the family's default, or else the model's width divided among its heads."""
    found = integer(raw, "head_dim", default)
    if found is not None:
        return found
    hidden, heads = integer(raw, "hidden_size"), integer(raw, "num_attention_heads")
    if hidden % heads:
        raise ValueError(f"head_dim is missing and hidden_size {hidden} is not a multiple of {heads} heads")
    return hidden // heads


def divided_head_size(raw: Raw) -> int:
    """The model's width divided among its heads; another `head_dim` is refused."""
    size = head_size({**raw, "head_dim": None})
    only(raw, "head_dim", size)
    return size

"""Error messages for values and names that are refused, and the check whether a value has any effect."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

Table = Mapping[str, tuple[Any, ...]]  # of a name, the values that ask for nothing


def shown(value: Any) -> str:
    """A value as an error quotes it, cut short."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def among(value: Any, allowed: Iterable[Any]) -> bool:
    """Whether a value is one of the allowed: 1.0 is 1, but true is not."""
    return any(value is x or (alike(value, x) and value == x) for x in allowed)


def alike(value: Any, other: Any) -> bool:
    """Whether two values are of one kind; those of other types may not be comparable."""
    if isinstance(value, bool) or isinstance(other, bool):
        return isinstance(value, bool) and isinstance(other, bool)
    return (
        isinstance(value, (int, float)) and isinstance(other, (int, float)) or isinstance(value, type(other))
    )


def check_neutral(name: str, value: Any, table: Table) -> None:
    """Raise ValueError where a value asks for something that is not here."""
    if not among(value, table[name]):
        allowed = " or ".join(map(repr, table[name])) or "None"
        raise ValueError(f"{name}={shown(value)} is not supported: only {allowed}")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like an unknown one."""
    return next(iter(get_close_matches(name[:60], sorted(known), 1)), None)


def unknown(what: str, name: str, known: Iterable[str], also: Iterable[str] = ()) -> str:
    """The sentence that refuses a name, with the nearest of those that are known, or understood `also`."""
    known = list(known)
    near = nearest(name, {*known, *also})
    hint = f", did you mean {near!r}?" if near else ";"
    return f"unknown {what} {name!r}{hint} known are {', '.join(known)}"


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """The object of JSON's pairs. Raises RepeatedKey for a key that stands in it more than once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise RepeatedKey(next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
    return found


class RepeatedKey(ValueError):
    """A key that an object of JSON has more than once."""

    def __init__(self, key: str):
        super().__init__(f"the key {shown(key)} is not allowed more than once in an object")
        self.key = key

"""Error messages for values and names that are refused, and the check whether a value has any effect."""

from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any


def shown(value: Any) -> str:
    """Return a value as an error quotes it, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def among(value: Any, allowed: Iterable[Any]) -> bool:
    """Return whether a value is one of the allowed: 1.0 is 1, but true is not."""
    return any(value is x or (alike(value, x) and value == x) for x in allowed)


def alike(value: Any, other: Any) -> bool:
    """Return whether two values are of one kind; values of other kinds may not be comparable."""
    if isinstance(value, bool) or isinstance(other, bool):
        return isinstance(value, bool) and isinstance(other, bool)
    return (
        isinstance(value, (int, float)) and isinstance(other, (int, float)) or isinstance(value, type(other))
    )


def require(ok: bool, message: str) -> None:
    """Raise ValueError with a message, unless a condition holds."""
    if not ok:
        raise ValueError(message)


def check_positive(options: Any, names: Iterable[str]) -> None:
    """Raise ValueError for an option that is not above 0."""
    for name in names:
        value = getattr(options, name)
        require(value > 0, f"{name} {shown(value)} is not allowed: more than 0")


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like an unknown one."""
    return next(iter(get_close_matches(name[:60], sorted(known), 1)), None)


def unknown(what: str, name: str, known: Iterable[str], also: Iterable[str] = ()) -> str:
    """Return the error about an unknown name, with the nearest name of `known` and `also`."""
    known = list(known)
    near = nearest(name, {*known, *also})
    hint = f", did you mean {near!r}?" if near else ";"
    return f"unknown {what} {name!r}{hint} known are {', '.join(known)}"


def renamed(former: str, name: str) -> str:
    """Return the note about a former name that was used."""
    return f"{former} is now {name}: the former name is still accepted"


def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return JSON's pairs as a dict. Raises RepeatedKey for a key that occurs more than once."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise RepeatedKey(next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
    return found


class RepeatedKey(ValueError):
    """An object of JSON has a key more than once."""

    def __init__(self, key: str):
        super().__init__(f"the key {shown(key)} is not allowed more than once in an object")
        self.key = key

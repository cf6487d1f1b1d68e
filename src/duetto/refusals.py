"""Error messages for values and names that are refused, and checks of values."""

from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any


def quote(value: Any) -> str:
    """Return the repr of a value for an error message, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def is_among(value: Any, allowed: Iterable[Any]) -> bool:
    """Return True if a value is allowed. 1.0 counts as 1, but true does not."""
    return any(value is x or (is_same_kind(value, x) and value == x) for x in allowed)


def is_same_kind(value: Any, other: Any) -> bool:
    """Return True if two values can be compared: both are booleans, numbers, or of one type."""
    if isinstance(value, bool) or isinstance(other, bool):
        return isinstance(value, bool) and isinstance(other, bool)
    return (
        isinstance(value, (int, float)) and isinstance(other, (int, float)) or isinstance(value, type(other))
    )


def ensure(ok: bool, message: str) -> None:
    """Raise ValueError with a message unless `ok`."""
    if not ok:
        raise ValueError(message)


def check_positive(options: Any, names: Iterable[str]) -> None:
    """Raise ValueError for an option that is not above 0."""
    for name in names:
        value = getattr(options, name)
        ensure(value > 0, f"{name} {quote(value)} is not allowed: more than 0")


def nearest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like an unknown one."""
    return next(iter(get_close_matches(name[:60], sorted(known), 1)), None)


def unknown_name_message(what: str, name: str, known: Iterable[str], also: Iterable[str] = ()) -> str:
    """Return the message about an unknown name, with the nearest name of `known` and `also`."""
    known = list(known)
    near = nearest_name(name, {*known, *also})
    hint = f", did you mean {near!r}?" if near else ";"
    return f"unknown {what} {name!r}{hint} known are {', '.join(known)}"


def former_name_note(former: str, name: str) -> str:
    """Return the note for a user of a former name."""
    return f"{former} is now {name}: the former name is still accepted"


def reject_repeated_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's pairs as a dict, for JSON's `object_pairs_hook`. Raises RepeatedKey."""
    result = dict(pairs)
    if len(result) < len(pairs):
        raise RepeatedKey(next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1))
    return result


class RepeatedKey(ValueError):
    """Error for a JSON object that has a key more than once."""

    def __init__(self, key: str):
        super().__init__(f"the key {quote(key)} is not allowed more than once in an object")
        self.key = key

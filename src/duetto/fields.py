"""Fields of the records that users fill in: how they are declared, and how their values are converted."""

from dataclasses import field
from typing import Any

import msgspec


def knob(default: Any, help: str, **about: Any) -> Any:
    """A dataclass field with its help; `flag=False` among `about` keeps it off the command line."""
    return field(default=default, metadata={"help": help, **about})


def converted(name: str, value: Any, kind: Any) -> Any:
    """A value as a field's type (an int becomes a float, a list a tuple). Raises TypeError with the field's
    name."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise TypeError(f"{name}={value!r}: {str(error).replace('Expected', 'expected', 1)}") from None

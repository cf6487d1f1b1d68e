"""Fields of option records: their declaration, and the conversion of their values."""

from dataclasses import field
from typing import Any

import msgspec


def knob(default: Any, help: str, **about: Any) -> Any:
    """Return a dataclass field with a help text.

    about: `flag=False` keeps it off the command line; `formerly` is a former name, `short` a short flag, and
    `several` the metavar of a flag with several values.
    """
    return field(default=default, metadata={"help": help, **about})


def convert_field(name: str, value: Any, kind: Any) -> Any:
    """Convert a value to a field's type (int to float, list to tuple). Raises TypeError that names it."""
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        raise TypeError(f"{name}={value!r}: {str(error).replace('Expected', 'expected', 1)}") from None

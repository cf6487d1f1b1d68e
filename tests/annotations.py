"""How the suite checks annotations: by their types as pyright reads them, where an int is a float too."""

from collections.abc import Callable
from functools import cache
from typing import Any

from beartype import BeartypeConf, beartype

CHECK = beartype(conf=BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose checks are made at its first call: most functions are not checked in a process."""
    made = cache(lambda: CHECK(function))
    return lambda *arguments, **named: made()(*arguments, **named)

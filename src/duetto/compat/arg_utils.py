"""`EngineArgs`: the keywords of `LLM` as a record, and as flags of a script's command line."""

import argparse
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, field, fields, make_dataclass
from functools import partial
from typing import Any, get_type_hints

from ..fields import knob
from ..neutral import EFFECTLESS, NEUTRAL
from ..serve.options.engine import EngineOptions
from ..serve.options.flags import add_fields
from ..serve.options.keywords import FORMER, OTHER_NAMES, OWN, check_keyword, current_names

OPTIONS, HINTS = {f.name: f for f in fields(EngineOptions)}, get_type_hints(EngineOptions)
HIDDEN: dict[str, Any] = (
    dict.fromkeys(OTHER_NAMES)
    | {name: values[0] if values else None for name, values in NEUTRAL["engine"].items()}
    | EFFECTLESS
)


def own(name: str) -> Any:
    return name, str | None, knob("auto" if name == "dtype" else None, argparse.SUPPRESS)


def option(name: str) -> Any:
    """Return the field of an engine's option. One with two names is None, so that either may be set."""
    about = {key: value for key, value in OPTIONS[name].metadata.items() if key != "flag"}
    default = None if name in OTHER_NAMES.values() else OPTIONS[name].default
    return name, HINTS[name] | None, knob(default, **about)


def hidden(name: str) -> Any:
    """Return a field that `--help` does not list; its type follows from its default."""
    default = HIDDEN[name]
    hint = Mapping[str, Any] if isinstance(default, dict) else Any if default is None else type(default)
    about = {"help": argparse.SUPPRESS}
    return name, hint | None, field(default_factory=partial(copy, default), metadata=about)


Fields: Any = make_dataclass(
    "Fields",
    [
        *(own(name) for name in OWN if name not in ("mesh", "compilation_cache")),
        *map(option, OPTIONS),
        *map(hidden, HIDDEN),
    ],
)


class EngineArgs(Fields):
    """Settable keywords of `LLM`: `LLM(**vars(args))`, `LLM(**asdict(args))` and `LLM.from_engine_args` take
    them.

    The fields are the keywords of `LLM`, and vLLM's neutral keywords. `LLM` checks the values. Raises
    TypeError for an unknown name; warns of a former one.
    """

    def __init__(self, model: str | None = None, **options: Any):
        given = current_names(options)
        for ours, (name, value) in given.items():
            if ours not in Fields.__dataclass_fields__:
                check_keyword(name, value, OPTIONS)
        super().__init__(model, **{ours: value for ours, (_, value) in given.items()})

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each field, with the field's default."""
        add_fields(parser, Fields, "engine")
        parser.set_defaults(**asdict(EngineArgs()))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Any:
        """Return the fields that a namespace has."""
        return cls(
            **{
                name: value
                for name, value in vars(args).items()
                if name in {**Fields.__dataclass_fields__, **FORMER}
            }
        )


class AsyncEngineArgs(EngineArgs):
    """`EngineArgs` for `AsyncLLM`."""

"""`EngineArgs`: the keywords of `LLM` as a record, and as flags of a script's command line."""

import argparse
from collections.abc import Mapping
from copy import copy
from dataclasses import asdict, field, fields, make_dataclass
from functools import partial
from typing import Any, get_type_hints

from ..neutral_values import EFFECTLESS, NEUTRAL
from ..option_fields import knob
from ..serve.options.engine import EngineOptions
from ..serve.options.flags import add_field_flags
from ..serve.options.keywords import (
    FORMER_NAMES,
    LLM_KEYWORDS,
    OTHER_NAMES,
    check_vllm_keyword,
    resolve_former_names,
)

OPTION_FIELDS, HINTS = {f.name: f for f in fields(EngineOptions)}, get_type_hints(EngineOptions)
HIDDEN_DEFAULTS: dict[str, Any] = (
    dict.fromkeys(OTHER_NAMES)
    | {name: values[0] if values else None for name, values in NEUTRAL["engine"].items()}
    | EFFECTLESS
)


def keyword_field(name: str) -> Any:
    """Return the field of a keyword of `LLM` that is no engine option. `--help` does not list it."""
    return name, str | None, knob("auto" if name == "dtype" else None, argparse.SUPPRESS)


def option_field(name: str) -> Any:
    """Return the field of an engine option. An option with two names defaults to None, so that either may be
    set."""
    about = {key: value for key, value in OPTION_FIELDS[name].metadata.items() if key != "flag"}
    default = None if name in OTHER_NAMES.values() else OPTION_FIELDS[name].default
    return name, HINTS[name] | None, knob(default, **about)


def hidden_field(name: str) -> Any:
    """Return a field that `--help` does not list; its type follows from its default."""
    default = HIDDEN_DEFAULTS[name]
    hint = Mapping[str, Any] if isinstance(default, dict) else Any if default is None else type(default)
    about = {"help": argparse.SUPPRESS}
    return name, hint | None, field(default_factory=partial(copy, default), metadata=about)


Fields: Any = make_dataclass(
    "Fields",
    [
        *(keyword_field(name) for name in LLM_KEYWORDS if name not in ("mesh", "compilation_cache")),
        *map(option_field, OPTION_FIELDS),
        *map(hidden_field, HIDDEN_DEFAULTS),
    ],
)


class EngineArgs(Fields):
    """Keywords of `LLM` as a mutable record: `LLM(**vars(args))` and `LLM.from_engine_args(args)` take it.

    The fields are the keywords of `LLM` and vLLM's neutral keywords; `LLM` checks their values. Raises
    TypeError for an unknown name, and warns of a former one.
    """

    def __init__(self, model: str | None = None, **options: Any):
        current = resolve_former_names(options)
        for ours, (name, value) in current.items():
            if ours not in Fields.__dataclass_fields__:
                check_vllm_keyword(name, value, OPTION_FIELDS)
        super().__init__(model, **{ours: value for ours, (_, value) in current.items()})

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add a flag for each field, with the field's default."""
        add_field_flags(parser, Fields, "engine")
        parser.set_defaults(**asdict(EngineArgs()))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Any:
        """Return the fields that a namespace has."""
        return cls(
            **{
                name: value
                for name, value in vars(args).items()
                if name in {**Fields.__dataclass_fields__, **FORMER_NAMES}
            }
        )


class AsyncEngineArgs(EngineArgs):
    """`EngineArgs` for `AsyncLLM`."""

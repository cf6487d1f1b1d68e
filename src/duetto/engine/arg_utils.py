"""`EngineArgs`: the keywords of `LLM` as a record, and as flags of a script's command line."""

import argparse
import json
from copy import copy
from dataclasses import field, fields, make_dataclass
from typing import Any, get_type_hints

from ..serve.options.engine import EngineOptions
from ..serve.options.flags import or_none, reading
from ..serve.options.keywords import OTHER_NAMES, OWN, check_keyword
from ..serve.options.neutral import EFFECTLESS, VALUES

OPTIONS = {f.name: f for f in fields(EngineOptions)}
NAMED = {
    name: "auto" if name == "dtype" else None for name in OWN if name not in ("mesh", "compilation_cache")
}
NEUTRAL = {name: values[0] if values else None for name, values in VALUES.items()} | EFFECTLESS
ALIASED = [name for pair in OTHER_NAMES.items() for name in pair]  # None, so that either name may be given
DEFAULTS: dict[str, Any] = (
    NAMED | {name: f.default for name, f in OPTIONS.items()} | dict.fromkeys(ALIASED) | NEUTRAL
)
SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "quantization": "-q",
}


def entry(default: Any) -> Any:
    return (
        field(default_factory=lambda: copy(default))
        if isinstance(default, (dict, list))
        else field(default=default)
    )


Fields: Any = make_dataclass("Fields", [(name, Any, entry(value)) for name, value in DEFAULTS.items()])


class EngineArgs(Fields):
    """What `LLM` is started with, settable; `LLM(**vars(args))`, `LLM(**asdict(args))` and
    `LLM.from_engine_args` take it.

    Its fields are the keywords of `LLM`, and those of vLLM's that ask for nothing here; values are checked by
    `LLM`. Raises TypeError for an unknown name.
    """

    def __init__(self, model: str | None = None, **options: Any):
        for name, value in options.items():
            if name not in DEFAULTS:
                check_keyword(name, value, OPTIONS)
        super().__init__(model, **options)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """A flag for each field."""
        group, hints = parser.add_argument_group("engine"), get_type_hints(EngineOptions)
        for name, default in DEFAULTS.items():
            how: dict[str, Any] = reading(hints[name]) if name in OPTIONS else reading_of(default)
            if name in NAMED:
                how["type"] = str
            text = OPTIONS[name].metadata["help"] if name in OPTIONS else argparse.SUPPRESS
            names = [f"--{name.replace('_', '-')}", *([SHORT[name]] if name in SHORT else [])]
            if "type" in how:
                how["type"] = or_none(how["type"])
            group.add_argument(*names, default=copy(default), help=text.replace("%", "%%"), **how)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Any:
        """The fields that a namespace has."""
        given = vars(args)
        return cls(**{name: given[name] for name in DEFAULTS if name in given})


class AsyncEngineArgs(EngineArgs):
    """`EngineArgs` for `AsyncLLM`."""


def reading_of(default: Any) -> dict[str, Any]:
    """How argparse reads a field of which only the default is known: JSON for a mapping, and for None
    whatever it looks like."""
    if isinstance(default, bool):
        return {"action": argparse.BooleanOptionalAction}
    if default is None:
        return {"type": json_or_text}
    return {"type": json.loads if isinstance(default, (dict, list)) else type(default)}


def json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text

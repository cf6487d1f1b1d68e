"""Command-line flags made from the fields of a dataclass: name, type, default and help are written once, in
the field."""

import argparse
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_origin, get_type_hints

from ...refusals import RepeatedKey, unique


def add_fields(
    parser: argparse.ArgumentParser, record: type, title: str, leave_out: Collection[str] = ()
) -> None:
    """A flag for each field; only those that are given appear in the namespace, under the field's name."""
    group, hints = parser.add_argument_group(title), get_type_hints(record)
    for f in fields(record):
        if f.name not in leave_out and f.metadata.get("flag", True):
            default = "" if f.default is None else f" (default: {f.default})"
            text = (f.metadata["help"] + default).replace("%", "%%")
            flag = f"--{f.name.replace('_', '-')}"
            how = reading(hints[f.name])
            if several := f.metadata.get("several"):  # after one flag
                how |= {"action": "extend", "nargs": "+", "metavar": several}
            group.add_argument(flag, default=argparse.SUPPRESS, help=text, **how)


def given(record: type, args: argparse.Namespace, leave_out: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a record that the command line set."""
    values = vars(args)
    return {f.name: values[f.name] for f in fields(record) if f.name in values and f.name not in leave_out}


def reading(hint: Any) -> dict[str, Any]:
    """How argparse reads a field of this type: lists by repeating the flag, tuples by commas, mappings and
    records as JSON, `none` where it is allowed."""
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)]
    origins = {get_origin(kind) or kind for kind in ([hint] if get_origin(hint) in CONTAINERS else kinds)}
    if bool in origins:
        return {"action": argparse.BooleanOptionalAction}
    if Mapping in origins or any(map(is_dataclass, origins)):
        return {"type": json_object, "metavar": "JSON"}
    if tuple in origins:
        return {"type": numbers, "metavar": "INT,INT,..."}
    if Sequence in origins:
        item = int if Sequence[int] in kinds else str
        return {"action": "append", "type": item, "metavar": f"{item.__name__.upper()} (repeatable)"}
    kind = next((kind for kind in (float, str) if kind in origins), int)
    optional = type(None) in get_args(hint)
    return {"type": or_none(kind) if optional else kind, "metavar": kind.__name__.upper()}


CONTAINERS = (Sequence, Mapping)


def or_none(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    read.__name__ = kind.__name__  # argparse names the type in its error
    return read


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


positive.__name__ = "positive integer"


def numbers(text: str) -> tuple[int, ...]:
    return tuple(positive(word) for word in text.split(","))


numbers.__name__ = "positive integers"


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except RepeatedKey as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if isinstance(value, dict):
        return value
    raise ValueError(text)


json_object.__name__ = "JSON object"

"""Command-line flags of a dataclass: each field declares name, type, default and help of its flag."""

import argparse
import contextlib
import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, get_args, get_origin, get_type_hints

from ...refusals import RepeatedKey, former_name_note, reject_repeated_keys


def add_field_flags(
    parser: argparse.ArgumentParser,
    record: type,
    title: str,
    leave_out: Collection[str] = (),
    defaults: Mapping[str, Any] | None = None,
) -> None:
    """Add a flag for each field of a record, and a hidden flag for its former name.

    defaults: the command's defaults, in place of the record's.

    The namespace gets only the flags on the command line, under the names of their fields.
    """
    group, hints = parser.add_argument_group(title), get_type_hints(record)
    add = partial(group.add_argument, default=argparse.SUPPRESS)
    for f in fields(record):
        if f.name in leave_out or not f.metadata.get("flag", True):
            continue
        arguments: dict[str, Any] = argparse_arguments(hints[f.name])
        text = f.metadata["help"]
        if several := f.metadata.get("several"):  # after one flag
            arguments |= {"action": "extend", "nargs": "+", "metavar": several}
        if text != argparse.SUPPRESS:
            default = (defaults or {}).get(f.name, f.default)
            text = (text + ("" if default in (None, ()) else f" (default: {default})")).replace("%", "%%")
        short = [f.metadata["short"]] if "short" in f.metadata else []
        add(f"--{f.name.replace('_', '-')}", *short, help=text, **arguments)
        if former := f.metadata.get("formerly"):
            words = [f"--{former.replace('_', '-')}"]
            if "action" in arguments:
                arguments, words = {"nargs": 0}, [*words, words[0].replace("--", "--no-")]
            arguments["action"] = FormerFlag
            add(*words, dest=f.name, help=argparse.SUPPRESS, **arguments)


class FormerFlag(argparse.Action):
    """Sets an option under its former flag, and writes a note to standard error."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        former, name = str(option_string), self.dest.replace("_", "-")
        is_no = former.startswith("--no-")
        note = f"{parser.prog}: {former_name_note(former, f'--no-{name}' if is_no else f'--{name}')}\n"
        with contextlib.suppress(OSError, ValueError, AttributeError):  # no reader, closed, none at all
            sys.stderr.write(note)
        setattr(namespace, self.dest, not is_no if self.nargs == 0 else values)


def read_given_fields(
    record: type, args: argparse.Namespace, leave_out: Collection[str] = ()
) -> dict[str, Any]:
    """Return the values of a record's fields that are on the command line."""
    values = vars(args)
    return {f.name: values[f.name] for f in fields(record) if f.name in values and f.name not in leave_out}


def argparse_arguments(hint: Any) -> dict[str, Any]:
    """Return the arguments of `add_argument` for a field of this type.

    A list repeats its flag, a tuple has commas, a mapping or a record is JSON. Any is JSON or text. A number
    or a list of numbers is a number. `none` is read if None is allowed.
    """
    kinds = [kind for kind in (get_args(hint) or (hint,)) if kind is not type(None)]
    origins = {get_origin(kind) or kind for kind in ([hint] if get_origin(hint) in CONTAINERS else kinds)}
    if bool in origins:
        return {"action": argparse.BooleanOptionalAction}
    if Any in origins:
        return {"type": make_optional_parser(parse_json_or_text)}
    wrap = make_optional_parser if type(None) in get_args(hint) else lambda kind: kind
    if Mapping in origins or any(map(is_dataclass, origins)):
        return {"type": wrap(parse_json_object), "metavar": "JSON"}
    if tuple in origins:
        return {"type": wrap(parse_positives), "metavar": "INT,INT,..."}
    if Sequence in origins and int not in origins:
        item = int if Sequence[int] in kinds else str
        return {"action": "append", "type": item, "metavar": f"{item.__name__.upper()} (repeatable)"}
    kind = next((kind for kind in (float, str) if kind in origins), int)
    return {"type": wrap(kind), "metavar": kind.__name__.upper()}


CONTAINERS = (Sequence, Mapping)


def make_optional_parser(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return a parser that reads "none" as None, and other text by `kind`."""

    def parse(text: str) -> Any:
        return None if text.lower() == "none" else kind(text)

    parse.__name__ = kind.__name__  # argparse names the type in its error
    return parse


def parse_json_or_text(text: str) -> Any:
    """Return the value of JSON, or the text itself if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse_positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


parse_positive.__name__ = "positive integer"


def parse_positives(text: str) -> tuple[int, ...]:
    return tuple(parse_positive(word) for word in text.split(","))


parse_positives.__name__ = "positive integers"


def parse_json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=reject_repeated_keys)
    except RepeatedKey as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if isinstance(value, dict):
        return value
    raise ValueError(text)


parse_json_object.__name__ = "JSON object"

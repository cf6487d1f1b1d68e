"""Structured outputs: names and meaning are those of vLLM's `StructuredOutputsParams`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec

from ..neutral_values import NEUTRAL, check_neutral
from ..option_fields import convert_field, knob
from ..refusals import quote, unknown_name_message

OptionPairs = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Constraint on an output, given in one of five ways; the whitespace fields are for JSON alone.

    Construction raises ValueError or TypeError, naming the field, its value and what is allowed. A schema,
    expression or grammar that cannot be compiled is refused when a request is submitted.
    """

    json: str | Mapping[str, Any] | None = knob(None, "a JSON Schema, as an object or its text")
    regex: str | None = knob(None, "a regular expression that all of the output matches")
    choice: Sequence[str] | None = knob(None, "texts of which the output is one")
    grammar: str | None = knob(None, "a grammar in llguidance's dialect of Lark or its JSON, or in GBNF")
    json_object: bool | None = knob(None, "true: any JSON object")
    disable_any_whitespace: bool = knob(False, "no whitespace between the tokens of JSON")
    whitespace_pattern: str | None = knob(None, "a regular expression for the whitespace of JSON")

    def __post_init__(self):
        for name, kind in StructuredOutputsParams.__annotations__.items():
            convert_field(f"structured_outputs.{name}", vars(self)[name], kind)
        ways = [name for name in WAYS if vars(self)[name] not in (None, False)]
        if len(ways) != 1:
            raise ValueError(
                f"structured_outputs={' and '.join(ways) or None} is not allowed: one of {', '.join(WAYS)}"
            )
        if self.choice is not None and not (self.choice and all(self.choice)):
            raise ValueError(
                f"structured_outputs.choice={list(self.choice)} is not allowed: texts, none empty"
            )
        if isinstance(self.json, str) and not is_json_object(self.json):
            raise ValueError(
                f"structured_outputs.json={quote(self.json)} is not allowed: the text of a JSON object"
            )

    @property
    def schema(self) -> Mapping[str, Any] | None:
        """JSON Schema of the output, or None if it is not constrained by one."""
        if self.json_object:
            return {"type": "object"}
        return json.loads(self.json) if isinstance(self.json, str) else self.json


WAYS = ("json", "regex", "choice", "grammar", "json_object")


def is_json_object(text: str) -> bool:
    """True if a text is a JSON object."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def parse_structured_outputs(value: Any) -> StructuredOutputsParams | None:
    """Parse the field of a request, which may be a JSON object. Raises TypeError or ValueError."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(
            f"structured_outputs={quote(value)}: expected an object with one of {', '.join(WAYS)}"
        )
    names, values = [f.name for f in fields(StructuredOutputsParams)], {}
    for name, field_value in value.items():
        if (dotted := f"structured_outputs.{name}") in NEUTRAL["structured_outputs"]:
            check_neutral("structured_outputs", dotted, field_value)
        elif name not in names:
            raise ValueError(unknown_name_message("field of structured_outputs", str(name), names))
        elif field_value is not None:
            kind = StructuredOutputsParams.__annotations__[name]
            values[name] = convert_field(f"structured_outputs.{name}", field_value, kind)
    return StructuredOutputsParams(**values)

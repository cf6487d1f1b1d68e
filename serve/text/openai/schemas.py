"""JSON Schemas of bodies and replies, from the tables that parse them and the types that are written."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_type_hints

import msgspec

from ....neutral import HARMLESS, NEUTRAL, Table
from ....sampling.checks import LIMITS
from ....sampling.params import SamplingParams
from . import bodies
from .tasks import BODY, DEFAULTS

Schema = dict[str, Any]
REF = "#/components/schemas/{name}"


@dataclass(frozen=True)
class Body:
    """A request's body.

    records: types of its fields; a later one wins
    others: schemas of further fields; `records` win
    defaults: sampling parameters
    closed: whether it allows no other fields
    """

    name: str
    records: tuple[type, ...]
    example: Mapping[str, Any]
    others: Mapping[str, Schema] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    closed: bool = False


EITHER = bodies.FormatFields, bodies.ProcessorFields
FORMS: dict[str, tuple[str, tuple[type, ...], dict[str, Any]]] = {
    "chat": (
        "ChatBody",
        (SamplingParams, bodies.ChatFields, bodies.ToolFields, *EITHER, bodies.StreamFields),
        {"messages": [{"role": "user", "content": "sort a list"}], "max_tokens": 64, "stream": True},
    ),
    "completion": (
        "CompletionBody",
        (
            SamplingParams,
            bodies.CompletionFields,
            *EITHER,
            bodies.StreamFields,
            bodies.EchoFields,
        ),
        {"prompt": "def add(a, b):", "max_tokens": 32, "stream": True},
    ),
    "response": (
        "ResponseBody",
        (SamplingParams, bodies.ResponseFields, bodies.ToolFields, bodies.ProcessorFields),
        {"input": "sort a list", "max_output_tokens": 64, "stream": True},
    ),
}


def body_of(form: str, defaults: Mapping[str, Any]) -> Body:
    """Return the body of a completion, a chat or a response, with default sampling parameters."""
    name, records, example = FORMS[form]
    table = {**NEUTRAL["body"], **(NEUTRAL["response"] if form == "response" else {})}
    own = {**DEFAULTS["completion" if form == "completion" else "chat"], **defaults}
    return Body(name, records, example, without_effect(table), own, closed=True)


def without_effect(table: Table = NEUTRAL["body"]) -> dict[str, Schema]:
    """Return fields that are accepted without effect, with the values that a table allows."""
    neutral = {
        name: {"enum": [*values, None], "description": "accepted as far as it asks for nothing"}
        for name, values in sorted(table.items())
    }
    return neutral | {name: {"description": "without effect"} for name in sorted(HARMLESS)}


class Schemas:
    """Collects the schemas of all named types that are referred to."""

    def __init__(self):
        self.found: dict[str, Schema] = {}

    def of(self, kind: Any) -> Schema:
        """Return the schema of a type, which may refer to others."""
        (schema,), named = msgspec.json.schema_components([kind], ref_template=REF)
        self.found |= named
        return schema

    def body(self, body: Body) -> Schema:
        """Return a reference to the schema of a body."""
        found = [f for record in body.records for f in self._fields(record, body.defaults)]
        properties = {name: schema for name, schema, _ in found}
        self.found[body.name] = {
            "type": "object",
            "properties": properties | {n: s for n, s in body.others.items() if n not in properties},
            "required": [name for name, _, is_required in found if is_required],
        } | ({"additionalProperties": False} if body.closed else {})
        return {"$ref": REF.format(name=body.name)}

    def _fields(self, record: type, defaults: Mapping[str, Any]) -> Iterable[tuple[str, Schema, bool]]:
        """Yield name, schema, and whether it is required, of each field of a body."""
        hints, is_sampling = get_type_hints(record), record is SamplingParams
        for f in fields(record):
            if is_sampling and f.name not in BODY:
                continue
            about = f.metadata["help"] + (
                f": {LIMITS[f.name][1]}" if is_sampling and f.name in LIMITS else ""
            )
            if f.default is MISSING:
                yield f.name, self.of(hints[f.name]) | {"description": about}, True
            else:
                default = defaults.get(f.name, f.default) if is_sampling else f.default
                own = {"description": about, "default": default}
                yield f.name, self.of(hints[f.name] | None) | own, False

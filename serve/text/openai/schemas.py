"""JSON Schemas of bodies and replies, from the tables that parse them and the types that are written."""

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, get_type_hints

import msgspec

from ....neutral_values import HARMLESS_FIELDS, NEUTRAL, NeutralTable
from ....sampling.checks import LIMITS
from ....sampling.params import SamplingParams
from . import body_fields
from .tasks import BODY_PARAM_NAMES, FORM_DEFAULTS

SchemaObject = dict[str, Any]
SCHEMA_REFERENCE = "#/components/schemas/{name}"


@dataclass(frozen=True)
class Body:
    """A request's body.

    records: types of its fields; a later one wins
    other_schemas: schemas of further fields; `records` win
    defaults: sampling parameters
    is_closed: whether it allows no other fields
    """

    name: str
    records: tuple[type, ...]
    example: Mapping[str, Any]
    other_schemas: Mapping[str, SchemaObject] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    is_closed: bool = False


COMMON_RECORDS = body_fields.ProcessorFields, body_fields.CacheFields
CONSTRAINED_RECORDS = body_fields.FormatFields, *COMMON_RECORDS
BODY_FORMS: dict[str, tuple[str, tuple[type, ...], dict[str, Any]]] = {
    "chat": (
        "ChatBody",
        (
            SamplingParams,
            body_fields.ChatFields,
            body_fields.ToolFields,
            *CONSTRAINED_RECORDS,
            body_fields.StreamFields,
        ),
        {"messages": [{"role": "user", "content": "sort a list"}], "max_tokens": 64, "stream": True},
    ),
    "completion": (
        "CompletionBody",
        (
            SamplingParams,
            body_fields.CompletionFields,
            *CONSTRAINED_RECORDS,
            body_fields.StreamFields,
            body_fields.EchoFields,
        ),
        {"prompt": "def add(a, b):", "max_tokens": 32, "stream": True},
    ),
    "response": (
        "ResponseBody",
        (SamplingParams, body_fields.ResponseFields, body_fields.ToolFields, *COMMON_RECORDS),
        {"input": "sort a list", "max_output_tokens": 64, "stream": True},
    ),
}


def make_task_body(form: str, defaults: Mapping[str, Any]) -> Body:
    """Return the body of a completion, a chat or a response, with default sampling parameters."""
    name, records, example = BODY_FORMS[form]
    table = {**NEUTRAL["body"], **(NEUTRAL["response"] if form == "response" else {})}
    merged_defaults = {**FORM_DEFAULTS["completion" if form == "completion" else "chat"], **defaults}
    return Body(name, records, example, ignored_field_schemas(table), merged_defaults, is_closed=True)


def ignored_field_schemas(table: NeutralTable = NEUTRAL["body"]) -> dict[str, SchemaObject]:
    """Return fields that are accepted without effect, with the values that a table allows."""
    neutral = {
        name: {"enum": [*values, None], "description": "accepted as far as it asks for nothing"}
        for name, values in sorted(table.items())
    }
    return neutral | {name: {"description": "without effect"} for name in sorted(HARMLESS_FIELDS)}


class SchemaCollector:
    """Collects the schemas of all named types that are referred to."""

    def __init__(self):
        self.components: dict[str, SchemaObject] = {}

    def add_type(self, kind: Any) -> SchemaObject:
        """Return the schema of a type, which may refer to others."""
        (schema,), named = msgspec.json.schema_components([kind], ref_template=SCHEMA_REFERENCE)
        self.components |= named
        return schema

    def add_body(self, body: Body) -> SchemaObject:
        """Return a reference to the schema of a body."""
        field_schemas = [f for record in body.records for f in self._field_schemas(record, body.defaults)]
        properties = {name: schema for name, schema, _ in field_schemas}
        self.components[body.name] = {
            "type": "object",
            "properties": properties | {n: s for n, s in body.other_schemas.items() if n not in properties},
            "required": [name for name, _, is_required in field_schemas if is_required],
        } | ({"additionalProperties": False} if body.is_closed else {})
        return {"$ref": SCHEMA_REFERENCE.format(name=body.name)}

    def _field_schemas(
        self, record: type, defaults: Mapping[str, Any]
    ) -> Iterable[tuple[str, SchemaObject, bool]]:
        """Yield name, schema, and whether it is required, of each field of a body."""
        hints, is_sampling = get_type_hints(record), record is SamplingParams
        for f in fields(record):
            if is_sampling and f.name not in BODY_PARAM_NAMES:
                continue
            description = f.metadata["help"] + (
                f": {LIMITS[f.name][1]}" if is_sampling and f.name in LIMITS else ""
            )
            if f.default is MISSING:
                yield f.name, self.add_type(hints[f.name]) | {"description": description}, True
            else:
                default = defaults.get(f.name, f.default) if is_sampling else f.default
                details = {"description": description, "default": default}
                yield f.name, self.add_type(hints[f.name] | None) | details, False

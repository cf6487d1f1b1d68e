"""Schemas as grammars read them: objects have only the properties that a schema names, unless it allows
others."""

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]
PROPERTY_KEYWORDS = ("properties", "patternProperties")  # schemas of an object's values, by name or pattern
ADDITIONAL = "additionalProperties"  # the schema of all other properties
ITEM_KEYWORDS = ("items", "prefixItems", "additionalItems")
COMBINER_KEYWORDS = ("allOf", "anyOf", "oneOf")  # several schemas of the same value
DEFINITION_KEYWORDS = ("$defs", "definitions")
TABLE_KEYWORDS = (*PROPERTY_KEYWORDS, *DEFINITION_KEYWORDS)  # schemas by a key
SCHEMA_KEYWORDS = frozenset((*TABLE_KEYWORDS, *COMBINER_KEYWORDS, *ITEM_KEYWORDS, ADDITIONAL))
# Keywords on the values of an object or array.
VALUE_KEYWORDS = (*PROPERTY_KEYWORDS, *ITEM_KEYWORDS, ADDITIONAL, "required")
UNKNOWN_REFERENCE = "$ref={!r:.100}: a reference to no part of the schema by its path (#/...)"
MAX_SCHEMAS = 50_000  # of one document: llguidance's limit
MAX_VALUES = 200_000  # of JSON in one document
EVERY_NAME = None  # the place of a value that may be under any name
ELEMENT = 0  # the place of an array's elements


def close_objects(schema: Mapping[str, Any]) -> Schema:
    """Return a copy of a schema in which objects allow no unnamed properties.

    An object with `properties` or `patternProperties` gets `additionalProperties: false`, unless it has that
    keyword. Objects that several schemas describe together stay open (`allOf`, `properties` beside `anyOf` or
    `$ref`, values of one name in these): each schema would exclude the properties of the others. Objects that
    require a property without a schema stay open too. Raises ValueError for more than MAX_SCHEMAS or
    MAX_VALUES.
    """
    root = copy_json(schema)
    schemas = [*iterate_schemas(root)]
    combined_ids = combined_schema_ids(schemas, root)
    for part in schemas:
        if id(part) not in combined_ids and is_closable(part):
            part[ADDITIONAL] = False
    return root


def copy_json(value: Any) -> Any:
    """Return a copy of a value of JSON, in which no list or mapping occurs twice. Raises ValueError for more
    than MAX_VALUES in it."""
    stack, count = [value], 0
    while stack:
        part = stack.pop()
        if isinstance(part, Mapping | list | tuple):
            count += len(part)
            if count > MAX_VALUES:
                raise ValueError(f"it has more than {MAX_VALUES} values")
            stack += part.values() if isinstance(part, Mapping) else part
    return json.loads(json.dumps(value))


def has_reference(schema: Any) -> bool:
    return isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str)


def resolve_reference(root: Mapping[str, Any], reference: str) -> Any:
    """Return the part of `root` that a reference leads to; None without one."""
    document, _, pointer = reference.partition("#")
    start, *steps = unquote(pointer).split("/")
    part: Any = None if document or start else root
    for step in steps:
        if part is None:  # a reference may be longer than the schema is deep
            return None
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(part, list):
            is_index = name.isdecimal() and len(name) <= len(str(len(part)))
            part = part[int(name)] if is_index and int(name) < len(part) else None
        else:
            part = part.get(name) if isinstance(part, Mapping) else None
    return part


def is_closable(schema: Schema) -> bool:
    """Return whether a schema names all properties of its object, and lacks `additionalProperties`."""
    known, required = schema.get("properties") or {}, schema.get("required")
    unnamed = set(map(str, required if isinstance(required, list) else ())).difference(known)
    return has_keyword(schema, PROPERTY_KEYWORDS) and ADDITIONAL not in schema and not unnamed


def has_keyword(schema: Schema, names: tuple[str, ...]) -> bool:
    return any(name in schema for name in names)


def iterate_schemas(root: Schema) -> Iterator[Schema]:
    """Yield a schema and all schemas in it, each once. Follows references; skips values of `enum`, `const`
    and `default`. Raises ValueError for more than MAX_SCHEMAS."""
    stack, seen = [root], set[int]()
    while stack:
        schema = stack.pop()
        if isinstance(schema, dict) and id(schema) not in seen:
            seen.add(id(schema))
            if len(seen) > MAX_SCHEMAS:
                raise ValueError(f"it has more than {MAX_SCHEMAS} schemas")
            yield schema
            stack += [
                part for name in schema if name in SCHEMA_KEYWORDS for part in keyword_schemas(name, schema)
            ]
            if has_reference(schema):
                stack.append(resolve_reference(root, schema["$ref"]))


def keyword_schemas(name: str, schema: Schema) -> list[Any]:
    """Return the schemas that are the value of a schema's key."""
    value = schema.get(name)
    if name in TABLE_KEYWORDS:
        return [*value.values()] if isinstance(value, dict) else []
    return value if isinstance(value, list) else [value]


def is_combined(schema: Schema) -> bool:
    """Return whether a schema describes a value together with other schemas: its parts or its reference."""
    num_combined = len(keyword_schemas("allOf", schema)) if "allOf" in schema else 0
    return (
        has_keyword(schema, VALUE_KEYWORDS)
        + num_combined
        + sum(name in schema for name in ("anyOf", "oneOf", "$ref"))
        > 1
    )


def combined_schema_ids(schemas: list[Schema], root: Schema) -> set[int]:
    """Return the ids of the schemas that may describe a value together with others. Returns all ids if such a
    schema has an unknown reference."""
    stack = [
        schema
        for whole in schemas
        for schema in ([whole] if is_combined(whole) else list_overlapping_schemas(whole))
    ]
    seen, values = set[int](), dict[str | int | None, Any]()
    while stack:
        schema = stack.pop()
        if not isinstance(schema, dict) or id(schema) in seen:
            continue
        seen.add(id(schema))
        stack += [part for name in COMBINER_KEYWORDS for part in keyword_schemas(name, schema)]
        if has_reference(schema):
            stack.append(target := resolve_reference(root, schema["$ref"]))
            if target is None:
                return {*map(id, schemas)}
        for place, value in iterate_value_schemas(schema):
            if place is EVERY_NAME and EVERY_NAME not in values:
                stack += [value, *values.values()] if values else []
            elif before := [values[name] for name in {place, EVERY_NAME} & values.keys()]:
                stack += [value, *before]
            values[place] = value
    return seen


def list_overlapping_schemas(schema: Schema) -> list[Any]:
    """Return the schemas of an object's values, if several of them may describe one value."""
    schemas = [part for name in PROPERTY_KEYWORDS for part in keyword_schemas(name, schema)]
    return schemas if keyword_schemas("patternProperties", schema) and len(schemas) > 1 else []


def iterate_value_schemas(schema: Schema) -> Iterator[tuple[str | int | None, Schema]]:
    """Yield the schemas of an object's or array's values, and their places."""
    named = schema.get("properties")
    places: list[tuple[Any, Any]] = [*named.items()] if isinstance(named, dict) else []
    places += [
        (EVERY_NAME, value_schema)
        for name in ("patternProperties", ADDITIONAL)
        for value_schema in keyword_schemas(name, schema)
    ]
    places += [
        (ELEMENT, value_schema) for name in ITEM_KEYWORDS for value_schema in keyword_schemas(name, schema)
    ]
    return (pair for pair in places if isinstance(pair[1], dict))

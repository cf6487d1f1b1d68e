"""Schemas as grammars read them: objects have only the properties that a schema names, unless it allows
others."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

Schema = dict[str, Any]
NAMED = ("properties", "patternProperties")  # schemas of an object's values, by name or pattern
OTHERS = ("additionalProperties", "unevaluatedProperties")  # keys that say which other properties are allowed
LISTS = ("allOf", "anyOf", "oneOf")  # several schemas of the same value
CONDITIONS = ("if", "then", "else", "not", "dependentSchemas")  # more schemas of the same value
PARTS = ("items", "prefixItems", "contains", "additionalItems", "propertyNames", *OTHERS)
DEFINITIONS = ("$defs", "definitions")
TABLES = (*NAMED, *DEFINITIONS, "dependentSchemas")  # schemas by a key


def closed(schema: Mapping[str, Any]) -> Schema:
    """Return a copy of a schema of which each object with `properties` or `patternProperties` allows no
    others, unless it says which.

    Objects that several schemas describe together (several of `allOf`, `properties` beside `anyOf` or `$ref`,
    conditions) stay open: each of the schemas would exclude the properties of the others. So do objects that
    require a property without a schema.
    """
    root = json.loads(json.dumps(schema))  # a mapping that occurs twice becomes two
    each = [*schemas_in(root)]
    combined = (one for one in each if is_combined(one))
    shared = {id(one) for whole in combined for one in of_same_value(whole, root)}
    for one in each:
        if id(one) not in shared and names_all(one):
            one["additionalProperties"] = False
    return root


def at(root: Mapping[str, Any], reference: str) -> Any:
    """Return the part of a schema that a reference means; None if there is none."""
    found: Any = root
    for step in filter(None, reference.removeprefix("#").split("/")):
        name = step.replace("~1", "/").replace("~0", "~")
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def names_all(schema: Schema) -> bool:
    """True if a schema names the properties of its object, and does not say which others are allowed."""
    known, required = schema.get("properties") or {}, schema.get("required")
    unnamed = set(map(str, required if isinstance(required, list) else ())).difference(known)
    return has(schema, NAMED) and not has(schema, OTHERS) and not unnamed


def has(schema: Schema, names: tuple[str, ...]) -> bool:
    return any(name in schema for name in names)


def schemas_in(root: Schema) -> Iterator[Schema]:
    """Yield a schema and all schemas in it, but no values of `enum`, `const` or `default`."""
    left: list[Any] = [root]
    while left:
        schema = left.pop()
        if isinstance(schema, dict):
            yield schema
            for name in (*TABLES, *LISTS, *PARTS, *CONDITIONS):
                left += parts(name, schema.get(name))


def parts(name: str, value: Any) -> list[Any]:
    """Return the schemas that are the value of a schema's key."""
    if isinstance(value, list):
        return value
    return [*value.values()] if name in TABLES and isinstance(value, dict) else [value]


def is_combined(schema: Schema) -> bool:
    """True if a schema and others describe the properties of one object together."""
    several = len(parts("allOf", schema.get("allOf"))) if "allOf" in schema else 0
    groups = has(schema, NAMED) + several + sum(name in schema for name in ("anyOf", "oneOf", "$ref"))
    return groups > 1 or has(schema, CONDITIONS)


def of_same_value(schema: Schema, root: Schema) -> Iterator[Schema]:
    """Yield a schema and all that describe the same value, references followed."""
    left, seen = [schema], set[int]()
    while left:
        one = left.pop()
        if isinstance(one, dict) and id(one) not in seen:
            seen.add(id(one))
            yield one
            if isinstance(reference := one.get("$ref"), str):
                left.append(at(root, reference))
            for name in (*LISTS, *CONDITIONS):
                left += parts(name, one.get(name))

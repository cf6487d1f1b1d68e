"""Schemas as grammars read them: objects have only the properties that a schema names, unless it allows
others."""

import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]
NAMED = ("properties", "patternProperties")  # schemas of an object's values, by name or pattern
OTHERS = "additionalProperties"  # says which other properties are allowed
ELEMENTS = ("items", "prefixItems", "additionalItems")
LISTS = ("allOf", "anyOf", "oneOf")  # several schemas of the same value
DEFINITIONS = ("$defs", "definitions")
TABLES = (*NAMED, *DEFINITIONS)  # schemas by a key
KEYS = (*TABLES, *LISTS, *ELEMENTS, OTHERS)
OWN = (*NAMED, *ELEMENTS, OTHERS, "required")  # what a schema itself says of an object's or array's values
EVERY_NAME = None  # the place of a value that may be under any name
ELEMENT = 0  # the place of an array's elements


def closed(schema: Mapping[str, Any]) -> Schema:
    """Return a copy of a schema of which each object with `properties` or `patternProperties` allows no
    others, unless it says which.

    Objects that several schemas describe together (several of `allOf`, `properties` beside `anyOf` or `$ref`,
    values of one name in these) stay open: each of the schemas would exclude the properties of the others. So
    do objects that require a property without a schema.
    """
    root = json.loads(json.dumps(schema))  # a mapping that occurs twice becomes two
    each = [*schemas_in(root)]
    shared = shared_of(each, root)
    for one in each:
        if id(one) not in shared and names_all(one):
            one[OTHERS] = False
    return root


def at(root: Mapping[str, Any], reference: str) -> Any:
    """Return the part of a schema that a reference means; None if there is none."""
    document, _, pointer = reference.partition("#")
    start, *steps = unquote(pointer).split("/")
    found: Any = None if document or start else root
    for step in steps:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list):
            is_index = name.isdecimal() and len(name) <= len(str(len(found)))
            found = found[int(name)] if is_index and int(name) < len(found) else None
        else:
            found = found.get(name) if isinstance(found, Mapping) else None
    return found


def names_all(schema: Schema) -> bool:
    """True if a schema names the properties of its object, and does not say which others are allowed."""
    known, required = schema.get("properties") or {}, schema.get("required")
    unnamed = set(map(str, required if isinstance(required, list) else ())).difference(known)
    return has(schema, NAMED) and OTHERS not in schema and not unnamed


def has(schema: Schema, names: tuple[str, ...]) -> bool:
    return any(name in schema for name in names)


def schemas_in(root: Schema) -> Iterator[Schema]:
    """Yield a schema and all schemas in it once, references followed, but no values of `enum`, `const` or
    `default`."""
    left, seen = [root], set[int]()
    while left:
        schema = left.pop()
        if isinstance(schema, dict) and id(schema) not in seen:
            seen.add(id(schema))
            yield schema
            left += [part for name in KEYS for part in parts(name, schema)]
            if isinstance(reference := schema.get("$ref"), str):
                left.append(at(root, reference))


def parts(name: str, schema: Schema) -> list[Any]:
    """Return the schemas that are the value of a schema's key."""
    value = schema.get(name)
    if name in TABLES:
        return [*value.values()] if isinstance(value, dict) else []
    return value if isinstance(value, list) else [value]


def is_combined(schema: Schema) -> bool:
    """True if a schema and others describe one value together."""
    several = len(parts("allOf", schema)) if "allOf" in schema else 0
    return has(schema, OWN) + several + sum(name in schema for name in ("anyOf", "oneOf", "$ref")) > 1


def shared_of(each: list[Schema], root: Schema) -> set[int]:
    """Return the ids of those schemas that may describe a value together with others; of all if a reference
    that takes part is unknown."""
    left = [one for whole in each for one in ([whole] if is_combined(whole) else overlapping(whole))]
    seen, values = set[int](), dict[str | int | None, Any]()
    while left:
        one = left.pop()
        if not isinstance(one, dict) or id(one) in seen:
            continue
        seen.add(id(one))
        left += [part for name in LISTS for part in parts(name, one)]
        if isinstance(reference := one.get("$ref"), str):
            left.append(found := at(root, reference))
            if found is None:
                return {*map(id, each)}
        for place, value in values_of(one):
            if place is EVERY_NAME and EVERY_NAME not in values:
                left += [value, *values.values()] if values else []
            elif before := [values[name] for name in {place, EVERY_NAME} & values.keys()]:
                left += [value, *before]
            values[place] = value
    return seen


def overlapping(schema: Schema) -> list[Any]:
    """Return the schemas of an object's values of which several may describe one value."""
    found = [part for name in NAMED for part in parts(name, schema)]
    return found if parts("patternProperties", schema) and len(found) > 1 else []


def values_of(schema: Schema) -> Iterator[tuple[str | int | None, Schema]]:
    """Yield the schemas of an object's or array's values, and their places."""
    named = schema.get("properties")
    places: list[tuple[Any, Any]] = [*named.items()] if isinstance(named, dict) else []
    places += [(EVERY_NAME, one) for name in ("patternProperties", OTHERS) for one in parts(name, schema)]
    places += [(ELEMENT, one) for name in ELEMENTS for one in parts(name, schema)]
    return (pair for pair in places if isinstance(pair[1], dict))

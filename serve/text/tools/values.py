"""Parameter values written as text: the tool's schema gives the type."""

import json
from collections.abc import Mapping
from typing import Any

ALL = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}
DEEPEST = 16  # schemas in schemas that are looked into


def read(text: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """Return a text as JSON: a string as it is, other types as JSON or Python writes them. A value that is a
    string or another type becomes the other type; one of no allowed type becomes a string. References begin
    at the schema `root`."""
    allowed, bare = types_of(schema, root), text.strip()
    if allowed != {"string"}:
        bare = WORDS.get(bare.lower(), bare)
        kind = kind_of(bare)
        if kind in allowed or (kind == "integer" and "number" in allowed):
            return bare
    return json.dumps(text, ensure_ascii=False)


def kind_of(text: str) -> str | None:
    """Return the type of a JSON value other than a string; None for other text."""
    try:
        value = json.loads(text, parse_constant=refused)
    except (ValueError, RecursionError):
        return None
    return "null" if value is None else None if isinstance(value, str) else KINDS[type(value)]


def refused(word: str) -> None:
    raise ValueError(word)


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Return the types that a schema may allow; all if it does not say."""
    if not isinstance(schema, Mapping) or depth > DEEPEST:
        return ALL
    if isinstance(reference := schema.get("$ref"), str):
        return types_of(at(root, reference), root, depth + 1)
    if isinstance(given := schema.get("type"), str | list):
        return frozenset([given] if isinstance(given, str) else map(str, given))
    if isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
        return frozenset("null" if value is None else KINDS.get(type(value), "string") for value in values)
    for name in ("anyOf", "oneOf"):
        if isinstance(several := schema.get(name), list):
            return frozenset().union(*(types_of(one, root, depth + 1) for one in several))
    return ALL


def at(root: Mapping[str, Any], reference: str) -> Any:
    """Return the part of a schema that a reference means; None if there is none."""
    found: Any = root
    for step in reference.removeprefix("#/").split("/"):
        found = found.get(step) if isinstance(found, Mapping) else None
    return found


def choices(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[str] | None:
    """Return the texts of the only values that a schema allows, if it lists them."""
    if isinstance(reference := schema.get("$ref"), str):
        schema = found if isinstance(found := at(root, reference), Mapping) else {}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list):
        return None
    return [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in values]

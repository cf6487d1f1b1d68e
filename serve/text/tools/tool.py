"""Tools that a reply may call, and values of their parameters that are written as text."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from .json_schema import DEFINITIONS, at, closed
from .lark import quoted

Choice = Literal["none", "auto", "required"]
ALL = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
WORDS = {"true": "true", "false": "false", "none": "null", "null": "null"}
DEEPEST = 16  # nested schemas that are followed


@dataclass(frozen=True)
class Tool:
    """A function: its name, and the JSON Schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Schema of the arguments that a grammar asks for: objects with the named properties only, unless
        the schema allows others; a reference is followed."""
        found = self.parameters
        if isinstance(reference := found.get("$ref"), str) and isinstance(at(found, reference), Mapping):
            found = {**definitions(found), **at(found, reference)}
        return {"type": "object", **(closed(found) if found else {"additionalProperties": False})}

    @property
    def properties(self) -> Mapping[str, Any]:
        found = self.arguments.get("properties")
        return found if isinstance(found, Mapping) else {}

    def schema(self, parameter: str) -> Mapping[str, Any]:
        """Return the schema of a parameter; empty if unknown."""
        found = self.properties.get(parameter)
        return found if isinstance(found, Mapping) else {}

    def rooted(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a part of the schema with the definitions that its references need."""
        return {**definitions(self.arguments), **schema}


@dataclass(frozen=True)
class Toolbox:
    """The tools of a request.

    given: as in a body of OpenAI's, for chat templates
    choice: whether tools may not, may, or must be called
    only: the one tool that must be called
    allowed: names of the tools that may be called; None: all
    is_several: whether there may be several calls
    """

    given: Sequence[Mapping[str, Any]]
    choice: Choice = "auto"
    only: str | None = None
    is_several: bool = True
    allowed: frozenset[str] | None = None

    @property
    def is_forced(self) -> bool:
        return self.choice == "required"

    @cached_property
    def tools(self) -> tuple[Tool, ...]:
        functions = [tool["function"] for tool in self.given] if self.choice != "none" else []
        found = (Tool(one["name"], one.get("parameters") or {}) for one in functions)
        known = (tool for tool in found if self.allowed is None or tool.name in self.allowed)
        return tuple(tool for tool in known if self.only in (None, tool.name))


# ---------------------------------------------------------------- values written as text, by their schema


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
    return quoted(text)


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


def definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a schema that references point to."""
    return {name: schema[name] for name in DEFINITIONS if name in schema}


def choices(schema: Mapping[str, Any], root: Mapping[str, Any]) -> list[str] | None:
    """Return the texts of the only values that a schema allows, if it lists them."""
    if isinstance(reference := schema.get("$ref"), str):
        schema = found if isinstance(found := at(root, reference), Mapping) else {}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list):
        return None
    return [one if isinstance(one, str) else json.dumps(one, ensure_ascii=False) for one in values]

"""Tools that a reply may call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from .values import at

Choice = Literal["none", "auto", "required"]
ANCHORS = ("$defs", "definitions")  # keys of a schema with the definitions of references
OTHERS = {  # keys of a schema that allow other arguments
    "additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "if",
}  # fmt: skip


@dataclass(frozen=True)
class Tool:
    """A function: its name, and the JSON Schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """Schema of the arguments that a grammar asks for: an object with the named parameters only, unless
        the schema allows others; a reference is followed."""
        found = self.parameters
        if isinstance(reference := found.get("$ref"), str) and isinstance(at(found, reference), Mapping):
            found = self.rooted(at(found, reference))
        is_closed = (found.get("properties") or not found) and not OTHERS.intersection(found)
        return {"type": "object", **({"additionalProperties": False} if is_closed else {}), **found}

    @property
    def properties(self) -> Mapping[str, Any]:
        """Schemas of the parameters by name."""
        found = self.arguments.get("properties")
        return found if isinstance(found, Mapping) else {}

    def schema(self, parameter: str) -> Mapping[str, Any]:
        """Return the schema of a parameter; empty if unknown."""
        found = self.properties.get(parameter)
        return found if isinstance(found, Mapping) else {}

    def rooted(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a part of the schema with the definitions that its references need."""
        return {**{name: self.parameters[name] for name in ANCHORS if name in self.parameters}, **schema}


@dataclass(frozen=True)
class Toolbox:
    """The tools of a request.

    given: as in a body of OpenAI's, for chat templates
    choice: whether tools may not, may, or must be called
    only: the one tool that must be called
    is_several: whether there may be several calls
    """

    given: Sequence[Mapping[str, Any]]
    choice: Choice = "auto"
    only: str | None = None
    is_several: bool = True

    @property
    def is_forced(self) -> bool:
        return self.choice == "required"

    @cached_property
    def tools(self) -> tuple[Tool, ...]:
        """Tools that may be called."""
        functions = [tool["function"] for tool in self.given] if self.choice != "none" else []
        found = (Tool(one["name"], one.get("parameters") or {}) for one in functions)
        return tuple(tool for tool in found if self.only in (None, tool.name))

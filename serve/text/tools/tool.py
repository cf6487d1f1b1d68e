"""The tools that a reply may call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from .values import at

Choice = Literal["none", "auto", "required"]
ANCHORS = ("$defs", "definitions")  # of what references mean
OTHERS = {  # what says which other arguments there may be
    "additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "if",
}  # fmt: skip


@dataclass(frozen=True)
class Tool:
    """A function by its name, and the JSON Schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """The schema of arguments that are asked for: an object of the parameters that are named, unless it
        says what else there may be, or that there may be anything; a reference is followed."""
        found = self.parameters
        if isinstance(reference := found.get("$ref"), str) and isinstance(at(found, reference), Mapping):
            found = self.rooted(at(found, reference))
        is_closed = (found.get("properties") or not found) and not OTHERS.intersection(found)
        return {"type": "object", **({"additionalProperties": False} if is_closed else {}), **found}

    @property
    def properties(self) -> Mapping[str, Any]:
        """The parameters by their names."""
        found = self.arguments.get("properties")
        return found if isinstance(found, Mapping) else {}

    def schema(self, parameter: str) -> Mapping[str, Any]:
        """The schema of one of its parameters; an empty one where nothing is said of it."""
        found = self.properties.get(parameter)
        return found if isinstance(found, Mapping) else {}

    def rooted(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """A schema within that of the parameters, with what its references may mean."""
        return {**{name: self.parameters[name] for name in ANCHORS if name in self.parameters}, **schema}


@dataclass(frozen=True)
class Toolbox:
    """Tools as a body of OpenAI's has them, for chat templates: none of them may be called, any may, one or
    more must, or `only` the one of this name; `is_several` says whether there may be several calls."""

    given: Sequence[Mapping[str, Any]]
    choice: Choice = "auto"
    only: str | None = None
    is_several: bool = True

    @property
    def is_forced(self) -> bool:
        """Whether a call must come."""
        return self.choice == "required"

    @cached_property
    def tools(self) -> tuple[Tool, ...]:
        """Those that may be called."""
        functions = [tool["function"] for tool in self.given] if self.choice != "none" else []
        found = (Tool(one["name"], one.get("parameters") or {}) for one in functions)
        return tuple(tool for tool in found if self.only in (None, tool.name))

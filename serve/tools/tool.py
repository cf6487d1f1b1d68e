"""What a message may call."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

ANCHORS = ("$defs", "definitions")  # of what references mean


@dataclass(frozen=True)
class Tool:
    """A function by its name, and the JSON Schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def arguments(self) -> Mapping[str, Any]:
        """The schema of arguments that are asked for: an object of the parameters that are named, unless it
        says that there may be others, or names none."""
        properties = self.parameters.get("properties")
        is_open = self.parameters.get("type") == "object" and not properties
        return {
            "type": "object", **({} if is_open else {"additionalProperties": False}), **self.parameters,
        }  # fmt: skip

    def schema(self, parameter: str) -> Mapping[str, Any]:
        """The schema of one of its parameters; an empty one where nothing is said of it."""
        properties = self.parameters.get("properties")
        found = properties.get(parameter) if isinstance(properties, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def rooted(self, schema: Mapping[str, Any]) -> Mapping[str, Any]:
        """A schema within that of the parameters, with what its references may mean."""
        return {**{name: self.parameters[name] for name in ANCHORS if name in self.parameters}, **schema}

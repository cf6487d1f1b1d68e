"""What a message may call."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tool:
    """A function by its name, and the JSON Schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object"})

    def schema(self, parameter: str) -> Mapping[str, Any]:
        """The schema of one of its parameters; an empty one where nothing is said of it."""
        properties = self.parameters.get("properties")
        found = properties.get(parameter) if isinstance(properties, Mapping) else None
        return found if isinstance(found, Mapping) else {}

"""Fields of a `config.json` that record which of them are read."""

from typing import Any

from ..families.fields import Raw


class FieldLog(dict[str, Any]):
    """Fields that record the names which are read, of nested fields too."""

    def __init__(self, fields: Raw, names: set[str]):
        super().__init__(fields)
        self.names = names

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        value = super().get(key, default)
        return FieldLog(value, self.names) if isinstance(value, dict) else value

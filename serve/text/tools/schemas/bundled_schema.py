"""Copies of parts of a schema as separate documents."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .json_schema import (
    MAX_SCHEMAS,
    UNKNOWN_REFERENCE,
    Schema,
    copy_json,
    has_reference,
    iterate_schemas,
    resolve_reference,
)


@dataclass
class SchemaBundler:
    """Copier of parts of the schema `root`, each with the schemas that its references lead to."""

    root: Mapping[str, Any]
    _num_schemas: int = 0

    def bundle(self, part: Any) -> Schema:
        """Return a copy of a part, with the targets of its references under `$defs`. Raises ValueError for
        a reference to no part of `root`, and for more than MAX_SCHEMAS in all that were copied."""
        references, numbers = list[str](), dict[str, int]()
        document = self._copy(part, references, numbers)
        document = document if isinstance(document, dict) else {} if document else {"enum": []}
        targets = [
            self._copy(resolve_reference(self.root, reference), references, numbers)
            for reference in references
        ]
        return (
            document | {"$defs": {str(i): target for i, target in enumerate(targets)}}
            if targets
            else document
        )

    def _copy(self, part: Any, references: list[str], numbers: dict[str, int]) -> Any:
        """Return a copy of a schema whose references are `numbers` under `$defs`. New ones are added to both
        arguments."""
        copy = copy_json(part)
        schemas = [*iterate_schemas(copy)] if isinstance(copy, dict) else []
        self._num_schemas += len(schemas)
        if self._num_schemas > MAX_SCHEMAS:
            raise ValueError(f"its parameters refer to more than {MAX_SCHEMAS} schemas")
        for schema in schemas:
            if has_reference(schema):
                if resolve_reference(self.root, schema["$ref"]) is None:
                    raise ValueError(UNKNOWN_REFERENCE.format(schema["$ref"]))
                if (number := numbers.setdefault(schema["$ref"], len(references))) == len(references):
                    references.append(schema["$ref"])
                schema["$ref"] = f"#/$defs/{number}"
        return copy

"""Grammars in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .schemas.exact_schema import adapt_schema
from .schemas.json_schema import copy_json

MAX_CHARACTERS = 4 << 20  # of all schemas in a grammar
# JSON as chat templates write it; without this a schema allows any amount of white space.
JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
SPECIAL_TEXT = re.compile(r"(<[^<>\s]+>|\[/?[A-Z_]+\])")  # text that may be one token


def quote_json(text: str) -> str:
    """Return a text as a string of Lark, which is one of JSON too. Lark's have no control characters."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


@dataclass
class Lark:
    """Rules of a grammar.

    special_id: function from a text to the id of the special token with this name, None without one
    rules: lines `name: terms`
    """

    special_id: Callable[[str], int | None]
    rules: list[str] = field(default_factory=list)
    _num_characters: int = 0

    def text_terms(self, text: str) -> str:
        """Return terms for a text, with its special tokens as such."""
        return " ".join(self._part_term(part) for part in SPECIAL_TEXT.split(text) if part)

    def _part_term(self, part: str) -> str:
        id = self.special_id(part) if SPECIAL_TEXT.fullmatch(part) else None
        return quote_json(part) if id is None else f"<[{id}]>"

    def add_rule(self, terms: str, attributes: str = "") -> str:
        """Add a rule, and return its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {terms}")
        return name

    def add_alternatives(self, choices: Iterable[str]) -> str:
        """Add a rule for one of several terms, and return its name."""
        return self.add_rule(" | ".join(choices))

    def json_term(self, schema: Mapping[str, Any]) -> str:
        """Return a term for JSON that a schema allows. Raises ValueError for a schema that a grammar cannot
        keep, and beyond MAX_CHARACTERS."""
        mended = copy_json(schema)
        options = adapt_schema(mended)
        text = json.dumps({**mended, "x-guidance": JSON_LAYOUT | options})
        self._num_characters += len(text)
        if self._num_characters > MAX_CHARACTERS:
            raise ValueError(f"the grammar has more than {MAX_CHARACTERS} characters")
        return f"%json {text}"

    def to_text(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self.rules])

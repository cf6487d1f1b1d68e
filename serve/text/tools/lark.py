"""Grammars in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# JSON as chat templates write it; without this a schema allows any amount of white space.
WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MARK = re.compile(r"(<[^<>\s]+>|\[/?[A-Z_]+\])")  # text that may be one token


def quoted(text: str) -> str:
    """Return a text as a string of Lark, which is one of JSON too."""
    return json.dumps(text, ensure_ascii=False)


@dataclass
class Lark:
    """The rules of a grammar. `special` returns the ids of special tokens, which no text becomes."""

    special: Callable[[str], int | None]
    rules: list[str] = field(default_factory=list)

    def text(self, text: str) -> str:
        """Return terms for a text, with its special tokens as such."""
        return " ".join(self._term(part) for part in MARK.split(text) if part)

    def _term(self, part: str) -> str:
        id = self.special(part) if MARK.fullmatch(part) else None
        return quoted(part) if id is None else f"<[{id}]>"

    def rule(self, terms: str, attributes: str = "") -> str:
        """Add a rule, and return its name."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {terms}")
        return name

    def one_of(self, choices: Iterable[str]) -> str:
        """Add a rule for one of several terms, and return its name."""
        return self.rule(" | ".join(choices))

    def json(self, schema: Mapping[str, Any]) -> str:
        """Return a term for JSON that a schema allows."""
        return f"%json {json.dumps({**schema, 'x-guidance': WRITTEN})}"

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self.rules])

"""Grammars in llguidance's dialect of Lark."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# JSON as chat templates write it; without this a schema allows any white space, and as much of it
WRITTEN = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MARK = re.compile(r"(<[^<>\s]+>|\[/?[A-Z_]+\])")  # what may be one token


@dataclass
class Lark:
    """The rules of a grammar. `special` has the ids of special tokens, which no text becomes."""

    special: Callable[[str], int | None]
    rules: list[str] = field(default_factory=list)

    def text(self, text: str) -> str:
        """Terms for a text, its special tokens as such."""
        return " ".join(self._term(part) for part in MARK.split(text) if part)

    def _term(self, part: str) -> str:
        id = self.special(part) if MARK.fullmatch(part) else None
        return self.quoted(part) if id is None else f"<[{id}]>"

    def quoted(self, text: str) -> str:
        """A text as such."""
        return json.dumps(text, ensure_ascii=False)

    def rule(self, terms: str, attributes: str = "") -> str:
        """The name of a rule of these terms."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {terms}")
        return name

    def one_of(self, choices: Iterable[str]) -> str:
        """The name of a rule for one of several terms."""
        return self.rule(" | ".join(choices))

    def json(self, schema: Mapping[str, Any]) -> str:
        """A term for JSON that a schema allows."""
        return f"%json {json.dumps({**schema, 'x-guidance': WRITTEN})}"

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self.rules])

"""How far a value of JSON goes."""

import re
from dataclasses import dataclass

STRING = re.compile(r'[^"\\]*')
SCALAR = re.compile(r"[\w.+-]+")
INSIDE = re.compile(r"[\w\s,:.+-]+")  # of brackets, outside of strings


@dataclass
class JsonScan:
    """Follows a value piece by piece: to behind its last bracket or quote, or up to what no JSON has
    outside of strings. Brackets are counted, not told apart: whoever reads the value finds what is wrong."""

    is_over: bool = False
    _depth: int = 0
    _in_string: bool = False
    _is_escaped: bool = False

    def take(self, text: str, at: int) -> int:
        """Where the value ends in a text that goes on with it at a place, as far as is known."""
        while at < len(text) and not self.is_over:
            at = self._within_string(text, at) if self._in_string else self._outside(text, at)
        return at

    def _within_string(self, text: str, at: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return at + 1
        found = STRING.match(text, at)
        assert found is not None
        if (at := found.end()) == len(text):
            return at
        self._in_string = self._is_escaped = text[at] == "\\"
        self.is_over = not self._in_string and not self._depth
        return at + 1

    def _outside(self, text: str, at: int) -> int:
        character = text[at]
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]" and self._depth:
            self._depth -= 1
            self.is_over = not self._depth
        elif found := (INSIDE if self._depth else SCALAR).match(text, at):
            return found.end()
        else:
            self.is_over = True
            return at
        return at + 1

"""Values that models write as Python does, read as JSON."""

import ast
import json
import re
from dataclasses import dataclass
from typing import Any

from .lark import quote_json

QUOTES = "\"'"
CONTROL_ESCAPES = str.maketrans({"\n": "\\n", "\r": "\\r", "\0": "\\0"})  # Python allows them in no string
PLAIN_TEXT = re.compile(r"[^\"'\\()\[\]{},]+")
STRING_TEXT = {quote: re.compile(rf"[^{quote}\\]+") for quote in QUOTES}
# A string without its end goes up to that of the text, so that no part of it is tried again.
STRING_PATTERN = re.compile(r"'(?:[^'\\]|\\.)*(?:'|\\?\Z)|\"(?:[^\"\\]|\\.)*(?:\"|\\?\Z)", re.DOTALL)


@dataclass
class PythonScan:
    """Scan for the end of a literal of Python or JSON: the comma or bracket behind it. Brackets are counted
    without regard to their kinds."""

    is_over: bool = False
    _depth: int = 0
    _quote: str = ""

    def advance(self, text: str, pos: int, end: int) -> int:
        while pos < end and not self.is_over:
            pos = (
                self._advance_in_string(text, pos, end)
                if self._quote
                else self._advance_outside(text, pos, end)
            )
        return pos

    def _advance_in_string(self, text: str, pos: int, end: int) -> int:
        quote = self._quote[0]
        if self._quote != quote:  # behind a backslash
            self._quote = quote
            return pos + 1
        if plain := STRING_TEXT[quote].match(text, pos, end):
            return plain.end()
        self._quote = quote + "\\" if text[pos] == "\\" else ""
        return pos + 1

    def _advance_outside(self, text: str, pos: int, end: int) -> int:
        if plain := PLAIN_TEXT.match(text, pos, end):
            return plain.end()
        character = text[pos]
        if character in ",)" and not self._depth:
            self.is_over = True
            return pos
        if character in QUOTES:
            self._quote = character
        elif character in "([{":
            self._depth += 1
        elif character in ")]}" and self._depth:
            self._depth -= 1
        return pos + 1


def literal_to_json(text: str) -> str | None:
    """Return a literal of JSON or Python as JSON; None for other text."""
    try:
        json.loads(text, parse_constant=refuse_constant)
        return text
    except (ValueError, RecursionError):
        value = python_to_json(text)
    if value is None:
        value = python_to_json(STRING_PATTERN.sub(lambda string: string[0].translate(CONTROL_ESCAPES), text))
    return value


def python_to_json(text: str) -> str | None:
    """Return a literal of Python as JSON; None for other text, and for values that JSON has not."""
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def value_to_json(text: str) -> str:
    """Return a literal as JSON; text that is none as a string."""
    value = literal_to_json(text)
    return quote_json(text) if value is None else value


def partial_literal_to_json(text: str) -> str:
    """Return the JSON of a literal at whose end the text was cut, or the beginning of its JSON: a string
    without its closing quote, other text as it is."""
    if text[:1] not in tuple("([{" + QUOTES):
        return text
    value = literal_to_json(text)
    if value is not None or text[0] not in QUOTES:
        return text if value is None else value
    value = literal_to_json(text + text[0])
    return (quote_json(text[1:]) if value is None else value)[:-1]


def refuse_constant(word: str) -> Any:
    """Refuse a number that JSON has not. Raises ValueError."""
    raise ValueError(word)

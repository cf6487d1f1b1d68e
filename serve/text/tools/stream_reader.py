"""Parsing of text that arrives in pieces, by parsers written as if all of it were there. Such a parser is a
generator: it yields events, and None when it needs more text. Its events depend on the text alone, not on how
it was cut."""

import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import TypeVar

STRING = re.compile(r'[^"\\]*')
SCALAR = re.compile(r"[\w.+-]+")
INSIDE = re.compile(r"[\w\s,:.+-]+")  # of brackets, outside of strings


@dataclass(frozen=True)
class TextDelta:
    """Part of a message's text."""

    text: str


@dataclass(frozen=True)
class ToolCallStart:
    """The beginning of a call of the tool `name`; `id` is the model's own for it, if any."""

    name: str
    id: str | None = None


@dataclass(frozen=True)
class ToolCallArguments:
    """Part of the JSON text of a call's arguments."""

    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    """The end of a call."""


Event = TextDelta | ToolCallStart | ToolCallArguments | ToolCallEnd
T = TypeVar("T")
Steps = Generator[Event | None, None, T]


@dataclass
class JsonScan:
    """Finds the end of a JSON value piece by piece: behind its last bracket or quote, or before the first
    character that no JSON has outside of strings. Brackets are counted without their kinds: the parser of the
    value finds mismatches."""

    is_over: bool = False
    _depth: int = 0
    _in_string: bool = False
    _is_escaped: bool = False

    def take(self, text: str, at: int) -> int:
        """Return the position in a text, from `at` on, up to which the value goes as far as is known."""
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


class TextReader:
    """Text that has arrived and was not yielded. The part before `at` was read; it stays text unless it
    becomes an event."""

    def __init__(self):
        self.text, self.at, self.is_over = "", 0, False

    def consume(self) -> str:
        """Remove the part that was read, and return it."""
        text, self.text, self.at = self.text[: self.at], self.text[self.at :], 0
        return text

    def more(self) -> Steps[bool]:
        """Return whether another character comes."""
        while self.at == len(self.text) and not self.is_over:
            yield None
        return self.at < len(self.text)

    def peek(self) -> Steps[str]:
        """Return the next character, "" at the end."""
        return self.text[self.at] if (yield from self.more()) else ""

    def skip(self, mark: str) -> Steps[bool]:
        """Read a mark, if it comes next; return whether it does."""
        while not self.text.startswith(mark, self.at):
            if self.is_over or not mark.startswith(self.text[self.at :]):
                return False
            yield None
        self.at += len(mark)
        return True

    def skip_any(self, marks: Iterable[str]) -> Steps[bool]:
        """Read the first of several marks that comes next; return whether one does."""
        for mark in marks:
            if (yield from self.skip(mark)):
                return True
        return False

    def take_while(self, is_in: Callable[[str], bool]) -> Steps[str]:
        """Read characters of a kind."""
        start = self.at
        while (character := (yield from self.peek())) and is_in(character):
            self.at += 1
        return self.text[start : self.at]

    def skip_space(self) -> Steps[str]:
        return (yield from self.take_while(str.isspace))

    def stops_in(self, mark: str) -> Steps[bool]:
        """Return whether the text ends inside a mark that may come next."""
        while mark != (rest := self.text[self.at :]) and mark.startswith(rest):
            if self.is_over:
                return True
            yield None
        return False

    def until(self, mark: str) -> Steps[tuple[str, bool]]:
        """Read up to a mark; return the text before it, and whether it comes. Without it, read all of the
        text."""
        start = seen = self.at
        while (found := self.text.find(mark, seen)) < 0 and not self.is_over:
            seen = max(start, len(self.text) - len(mark) + 1)
            yield None
        end = len(self.text) if found < 0 else found
        self.at = end + len(mark) if found >= 0 else end
        return self.text[start:end], found >= 0

    def value(self) -> Steps[str]:
        """Read a JSON value, as far as it goes."""
        start, scan = self.at, JsonScan()
        while not scan.is_over and (yield from self.more()):
            self.at = scan.take(self.text, self.at)
        return self.text[start : self.at]

    def arguments(self) -> Steps[None]:
        """Yield a JSON value as it arrives. All text before it was yielded."""
        assert self.at == 0
        scan = JsonScan()
        while not scan.is_over and (yield from self.more()):
            self.at = scan.take(self.text, 0)
            if self.at:
                yield ToolCallArguments(self.consume())

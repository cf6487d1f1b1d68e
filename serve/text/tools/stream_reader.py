"""Parsing of streamed text by parsers that are written as if the whole text were there. A parser is a
generator: it yields events, and None when it needs more text. Its events depend on the text alone, not on the
borders of its pieces."""

import re
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

STRING_TEXT_PATTERN = re.compile(r'[^"\\]*')
SCALAR_PATTERN = re.compile(r"[\w.+-]+")
BRACKET_TEXT_PATTERN = re.compile(r"[\w\s,:.+-]+")  # of brackets, outside of strings
TAIL_CHARS = 64  # characters that are kept before the text, to find the beginning of a line or a mark


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


ParserEvent = TextDelta | ToolCallStart | ToolCallArguments | ToolCallEnd
T = TypeVar("T")
Steps = Generator[ParserEvent | None, None, T]


class Scan(Protocol):
    """Finds the end of a value piece by piece."""

    is_over: bool

    def advance(self, text: str, pos: int, end: int) -> int:
        """Read `text` from `pos` to at most `end`. Return the position up to which it certainly belongs to
        the value."""
        ...


@dataclass
class JsonScan:
    """Finds the end of a JSON value piece by piece: behind its last bracket or quote, or before the first
    character that no JSON has outside of strings. Brackets are counted without their kinds: the parser of the
    value finds mismatches."""

    is_over: bool = False
    _depth: int = 0
    _is_in_string: bool = False
    _is_escaped: bool = False

    def advance(self, text: str, pos: int, end: int) -> int:
        while pos < end and not self.is_over:
            pos = (
                self._advance_in_string(text, pos, end)
                if self._is_in_string
                else self._advance_outside(text, pos, end)
            )
        return pos

    def _advance_in_string(self, text: str, pos: int, end: int) -> int:
        if self._is_escaped:
            self._is_escaped = False
            return pos + 1
        plain = STRING_TEXT_PATTERN.match(text, pos, end)
        assert plain is not None
        if (pos := plain.end()) == end:
            return pos
        self._is_in_string = self._is_escaped = text[pos] == "\\"
        self.is_over = not self._is_in_string and not self._depth
        return pos + 1

    def _advance_outside(self, text: str, pos: int, end: int) -> int:
        character = text[pos]
        if character == '"':
            self._is_in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]" and self._depth:
            self._depth -= 1
            self.is_over = not self._depth
        elif plain := (BRACKET_TEXT_PATTERN if self._depth else SCALAR_PATTERN).match(text, pos, end):
            return plain.end()
        else:
            self.is_over = True
            return pos
        return pos + 1


class TextReader:
    """Reader of the text that has arrived and was not yielded.

    text: text that was not yielded
    pos: position in `text`; the part before it was read, and stays text unless it becomes an event
    is_over: whether no more text comes
    marks: texts that stand around calls and their parts. A value has one only if the value is complete, and
        no other call begins in it
    is_before_call: parser at a mark, which returns whether the mark certainly leads to another call, or to
        another part of a call
    """

    def __init__(
        self, marks: Iterable[str] = (), is_before_call: "Callable[[TextReader], Steps[bool]] | None" = None
    ):
        self.text, self.pos, self.is_over = "", 0, False
        self._tail = ""  # up to TAIL_CHARS characters before the text
        self.marks = tuple(marks)
        self._is_before_call = is_before_call
        self._max_mark_chars = max(map(len, self.marks), default=0)
        first = re.escape("".join({mark[0]: "" for mark in self.marks}))
        self._first_letters = re.compile(f"[{first}]" if first else "(?!)")

    def consume(self) -> str:
        """Remove the part that was read, and return it."""
        text, self.text, self.pos = self.text[: self.pos], self.text[self.pos :], 0
        self._tail = (self._tail + text)[-TAIL_CHARS:]
        return text

    def is_line_start(self) -> bool:
        """Return whether only spaces stand between this place and the beginning of its line, or a mark."""
        before = (self._tail + self.text[max(self.pos - TAIL_CHARS, 0) : self.pos])[-TAIL_CHARS:].rstrip(
            " \t"
        )
        return not before or before.endswith(("\n", *self.marks))

    def has_more(self) -> Steps[bool]:
        """Return whether another character comes."""
        while self.pos == len(self.text) and not self.is_over:
            yield None
        return self.pos < len(self.text)

    def peek(self) -> Steps[str]:
        """Return the next character, "" at the end."""
        return self.text[self.pos] if (yield from self.has_more()) else ""

    def skip(self, mark: str) -> Steps[bool]:
        """Read a mark, if it comes next; return whether it does."""
        while not self.text.startswith(mark, self.pos):
            if self.is_over or not mark.startswith(self.text[self.pos :]):
                return False
            yield None
        self.pos += len(mark)
        return True

    def skip_any(self, marks: Iterable[str]) -> Steps[bool]:
        """Read the first of several marks that comes next; return whether one does."""
        for mark in marks:
            if (yield from self.skip(mark)):
                return True
        return False

    def read_while(self, is_in: Callable[[str], bool]) -> Steps[str]:
        """Read characters while `is_in` is true of them, and return them."""
        start = self.pos
        while (character := (yield from self.peek())) and is_in(character):
            self.pos += 1
        return self.text[start : self.pos]

    def skip_space(self) -> Steps[str]:
        return (yield from self.read_while(str.isspace))

    def ends_in_mark(self, *marks: str) -> Steps[bool]:
        """Return whether the whole text ends inside one of `marks`, begun at this position."""
        for mark in marks:
            while mark != (rest := self.text[self.pos :]) and mark.startswith(rest):
                if self.is_over:
                    return True
                yield None
        return False

    def is_at_mark(self) -> Steps[bool]:
        """Return whether a mark comes next, or the text ends before that is certain."""
        while not self.text.startswith(self.marks, self.pos):
            rest = self.text[self.pos : self.pos + self._max_mark_chars]
            if not any(mark.startswith(rest) for mark in self.marks):
                return False
            if self.is_over:
                return True
            yield None
        return True

    def is_at_call(self) -> Steps[bool]:
        """Return whether the mark that comes next leads to another call, or to another part of one."""
        pos = self.pos
        is_next = self._is_before_call is not None and (yield from self._is_before_call(self))
        self.pos = pos
        return is_next

    def _next_mark_pos(self) -> int:
        """Return the next position where a mark may begin; the end of the text without one."""
        match = self._first_letters.search(self.text, self.pos)
        return len(self.text) if match is None else match.start()

    def skip_to_mark(self) -> Steps[bool]:
        """Read up to the next mark, or to the end of the text; return whether there is a mark, or what may
        become one."""
        while (yield from self.has_more()):
            self.pos = self._next_mark_pos()
            if self.pos < len(self.text):
                if (yield from self.is_at_mark()):
                    return True
                self.pos += 1
        return False

    def scan_value(self, scan: Scan, is_streamed: bool = False) -> Steps[bool]:
        """Read a value as far as `scan` goes; return whether its end was read. If the text ends or another
        call begins before that, the value ends at the first mark. With `is_streamed`, yield the value as it
        arrives; all text before it must have been yielded."""
        mark: int | None = None
        while not scan.is_over and (yield from self.has_more()):
            mark_pos = self._next_mark_pos()
            if mark_pos == self.pos and (yield from self.is_at_mark()):
                mark = self.pos if mark is None else mark
                if (yield from self.is_at_call()):
                    break
            self.pos = scan.advance(self.text, self.pos, max(mark_pos, self.pos + 1))
            if is_streamed and mark is None and self.pos:
                yield ToolCallArguments(self.consume())
        if mark is not None and not scan.is_over:
            self.pos = mark
        if is_streamed and self.pos:
            yield ToolCallArguments(self.consume())
        return scan.is_over

    def read_json(self) -> Steps[str]:
        """Read a JSON value, as far as it goes."""
        start = self.pos
        yield from self.scan_value(JsonScan())
        return self.text[start : self.pos]

    def yield_arguments(self) -> Steps[None]:
        """Yield a JSON value as it arrives. All text before it was yielded."""
        assert self.pos == 0
        yield from self.scan_value(JsonScan(), is_streamed=True)

"""Formats of tool calls in a message: marks around calls, and the form of each."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..tokenizer.detokenizer import overlap
from .call_forms import CallForm
from .lark import Lark
from .stream_reader import Event, Steps, TextDelta, TextReader
from .tool import Tool

MANY = 1 << 20  # calls of a message


@dataclass(frozen=True)
class ToolFormat:
    """Layout of tool calls in a model's messages.

    begin, end: marks around calls; `end` is "" without one
    forms: forms of a call that are read; the last one is written
    opens, closes: text behind `begin` and before `end`
    between: text from one call to the next; None: each call stands between marks of its own
    apart: text before the next mark, if each call has its own
    is_bare: a message may begin with calls without marks, and calls are written so
    has_short_ids: ids of calls have nine letters and digits
    is_loose: a call may follow another without text between them
    also: other marks that begin calls; the first is `begin` with text before it, and may be written too
    is_single: a message has one call, which an end token of the model ends: its mark may be left out

    Text that is no call of a known tool stays text, marks included; white space around calls is dropped.
    """

    forms: tuple[CallForm, ...]
    opens: str = ""
    closes: str = ""
    between: str | None = None
    apart: str = "\n"
    is_bare: bool = False
    has_short_ids: bool = False
    is_loose: bool = False
    also: tuple[str, ...] = ()
    is_single: bool = False
    begin: str = ""
    end: str = ""

    def grammar(self, tools: Iterable[Tool], is_several: bool, lark: Lark) -> str:
        """Return terms for one call of one of the tools, or for several."""
        one = lark.one_of(self.forms[-1].written(tool, lark) for tool in tools)
        begin, end = ("", "") if self.is_bare else (self.begin, self.end)
        before, after = lark.text(begin + self.opens), lark.text(self.closes + end)
        if self.also:
            before = lark.one_of([lark.text(self.also[0] + self.opens), before])
        if self.is_single:
            return f"{before} {one} ({after})?"
        if not is_several:
            return f"{before} {one} {after}"
        if self.between is None:
            section = lark.rule(f"{before} {one} {after}")
            return f"{section} ({lark.text(self.apart)} {section})*"
        return f"{before} {one} ({lark.text(self.between)} {one})* {after}"

    def events(self, reader: TextReader, tools: Mapping[str, Tool], most: int) -> Steps[None]:
        """Yield a message's text and at most `most` calls."""
        count = 0
        if self.is_bare:
            yield from reader.skip_space()
            yield from reader.skip(self.begin)
            count = yield from self._section(reader, tools, most)
        while count < most and (yield from text_before(reader, (*self.also, self.begin))):
            count += yield from self._section(reader, tools, most - count)
        yield from rest(reader, count > 0)

    def _section(self, reader: TextReader, tools: Mapping[str, Tool], most: int) -> Steps[int]:
        """Yield the calls behind a mark; return their number."""
        yield from reader.skip_space()
        is_list = yield from reader.skip("[")
        count, goes_on = 0, True
        while goes_on:
            yield from reader.skip_space()
            form = yield from self._form(reader)
            if form is None or not (yield from form.call(reader, tools)):
                if reader.at:
                    yield TextDelta(reader.consume())
                break
            count += 1
            goes_on = yield from self._ended(reader, form, is_list, count < most)
        return count

    def _form(self, reader: TextReader) -> Steps[CallForm | None]:
        """Return the form whose opening comes next."""
        start = reader.at
        for form in sorted(self.forms, key=lambda form: -len(form.opens)):
            found = yield from reader.skip(form.opens)
            reader.at = start
            if found:
                return form
        return None

    def _ended(self, reader: TextReader, form: CallForm, is_list: bool, may_go_on: bool) -> Steps[bool]:
        """Read the text behind a call; return whether another call may follow."""
        reader.consume()
        yield from reader.skip_space()
        if may_go_on and (yield from reader.skip_any((",", ";"))):
            return True
        if is_list and (yield from reader.skip("]")):
            reader.consume()
            yield from reader.skip_space()
        if self.end and (yield from reader.skip(self.end)):
            reader.consume()
            return False
        if self.is_loose:
            return may_go_on and (yield from reader.more())
        start = reader.at
        found = may_go_on and bool(form.opens) and (yield from reader.skip(form.opens))
        reader.at = start if found else 0
        return found


def text_before(reader: TextReader, marks: tuple[str, ...]) -> Steps[bool]:
    """Yield text up to the first of some marks, and read it; return whether one comes. White space before it
    is held."""
    while True:
        places = [(reader.text.find(mark), mark) for mark in marks if mark in reader.text]
        found, mark = min(places, default=(-1, ""))
        end = len(reader.text) - overlap(reader.text, marks) if found < 0 else found
        if kept := len(reader.text[:end].rstrip()):
            reader.at = kept
            yield TextDelta(reader.consume())
        elif found >= 0 or reader.is_over:
            reader.at = found + len(mark) if found >= 0 else 0
            return found >= 0
        else:
            yield None


def rest(reader: TextReader, is_bound: bool) -> Steps[None]:
    """Yield all further text; behind calls without white space at its end."""
    while True:
        holds = is_bound or not reader.is_over
        if kept := len(reader.text.rstrip() if holds else reader.text):
            reader.at = kept
            yield TextDelta(reader.consume())
        elif reader.is_over:
            return
        else:
            yield None


class ToolParser:
    """Parses a message's text as it arrives; `is_several` allows more than one call."""

    def __init__(self, format: ToolFormat, tools: Iterable[Tool], is_several: bool = True):
        self._reader = TextReader()
        known = {tool.name: tool for tool in tools}
        self._events = format.events(self._reader, known, MANY if is_several else 1)

    def take(self, text: str, at_end: bool = False) -> list[Event]:
        self._reader.text += text
        self._reader.is_over = at_end
        found: list[Event] = []
        for event in self._events:
            if event is None:
                break
            found.append(event)
        return found

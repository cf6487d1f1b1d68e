"""Formats of tool calls in a message: marks around calls, and the form of each."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from ..tokenizer.detokenizer import overlap_length
from ..tokenizer.surrogates import find_open_escape, replace_lone_surrogates
from .call_forms import CallForm
from .lark import Lark
from .stream_reader import JsonScan, ParserEvent, Steps, TextDelta, TextReader, ToolCallArguments, ToolCallEnd
from .tool import Tool

MAX_CALLS = 1 << 20  # calls of a message
MAX_STRAYS = 4  # marks from the end of a part of a call to the next call


@dataclass(frozen=True)
class ToolFormat:
    """Layout of tool calls in a model's messages.

    begin, end: marks around calls; `end` is "" without one
    forms: forms of a call that are read; the last one is written
    list_begin, list_end: text behind `begin` and before `end`
    separator: text from one call to the next; None: each call stands between marks of its own
    section_separator: text before the next mark, if each call has its own
    is_bare: a message may begin with calls without marks, and calls are written so
    has_short_ids: ids of calls have nine letters and digits
    is_loose: a call may follow another without text between them
    other_begins: other marks that begin calls
    is_single: a message has one call, which an end token of the model ends: its mark may be left out. The
        first mark of `other_begins` is `begin` with text before it, and may be written too
    has_bare_calls: calls may stand without marks at the beginning of a line

    Text that is no call of a known tool stays text, marks included; white space around calls is dropped.
    """

    forms: tuple[CallForm, ...]
    list_begin: str = ""
    list_end: str = ""
    separator: str | None = None
    section_separator: str = "\n"
    is_bare: bool = False
    has_short_ids: bool = False
    is_loose: bool = False
    other_begins: tuple[str, ...] = ()
    is_single: bool = False
    has_bare_calls: bool = False
    begin: str = ""
    end: str = ""

    def grammar_terms(self, tools: Iterable[Tool], allows_parallel_calls: bool, lark: Lark) -> str:
        """Return terms for one call of one of the tools, or for several."""
        call_term = lark.add_alternatives(self.forms[-1].grammar_terms(tool, lark) for tool in tools)
        begin, end = ("", "") if self.is_bare else (self.begin, self.end)
        before, after = lark.text_terms(begin + self.list_begin), lark.text_terms(self.list_end + end)
        if self.is_single:
            before = lark.add_alternatives([lark.text_terms(self.other_begins[0] + self.list_begin), before])
        if self.is_single:
            return f"{before} {call_term} ({after})?"
        if not allows_parallel_calls:
            return f"{before} {call_term} {after}"
        if self.separator is None:
            section = lark.add_rule(f"{before} {call_term} {after}")
            return f"{section} ({lark.text_terms(self.section_separator)} {section})*"
        return f"{before} {call_term} ({lark.text_terms(self.separator)} {call_term})* {after}"

    def parse_events(self, reader: TextReader, tools: Mapping[str, Tool], max_calls: int) -> Steps[None]:
        """Yield a message's text and at most `max_calls` calls."""
        count = 0
        if self.is_bare:
            yield from reader.skip_space()
            yield from reader.skip(self.begin)
            count = yield from self._parse_section(reader, tools, max_calls)
        bare = tuple(form.begin for form in self.forms if self.has_bare_calls)
        while count < max_calls and (
            mark := (yield from yield_text_before(reader, (*self._section_marks, *bare)))
        ):
            if mark in bare and not (yield from self._is_bare_call(reader, mark)):
                yield TextDelta(reader.consume())
            else:
                count += yield from self._parse_section(reader, tools, max_calls - count)
        yield from yield_rest(reader, count > 0)

    @cached_property
    def _section_marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (*self.other_begins, self.begin)))

    def compile_call_pattern(self, names: Iterable[str]) -> re.Pattern[str]:
        """Compile a pattern of a mark, and of the beginning of a call behind it as a group.

        At the end of a text it also matches a beginning of both. For forms without an opening, a call begins
        with one of `names`.
        """
        opens = [form.begin for form in self.forms if form.begin]
        prefixes = [form.prefix for form in self.forms if not form.begin]
        words = {prefix + name: "" for name in names for prefix in ("", *prefixes) if prefixes}
        named_calls = rf"(?:{join_text_patterns(words)})(?![\w.:-]|\Z)"
        call_begins = rf"{join_text_patterns(opens)}|{named_calls}"
        call_prefixes = rf"{join_prefix_patterns(opens)}|[\w.:-]{{0,{max(map(len, words), default=0)}}}"
        mark_texts, mark_prefixes = (
            join_text_patterns(self._section_marks),
            join_prefix_patterns(self._section_marks),
        )
        return re.compile(
            rf"(?:{mark_texts})\s*(?:\[\s*)?(?:({call_begins})|(?:{call_prefixes})\Z)|(?:{mark_prefixes})\Z"
        )

    @cached_property
    def marks(self) -> tuple[str, ...]:
        """Return the texts that stand only around calls and their parts."""
        marks = (*self._section_marks, self.end, *(mark for form in self.forms for mark in form.marks))
        return tuple(dict.fromkeys(filter(None, marks)))

    def is_before_call(self, reader: TextReader) -> Steps[bool]:
        """Return whether marks that end a call, if any, and then certainly another call come next."""
        strays = [*(stray for form in self.forms for stray in form.strays), *filter(None, [self.end])]
        for _ in range(MAX_STRAYS):
            yield from reader.skip_any(strays)
            yield from reader.skip_space()
        is_marked = yield from reader.skip_any(self._section_marks)
        if is_marked:
            yield from reader.skip_space()
            yield from reader.skip("[")
            yield from reader.skip_space()
        start = reader.pos
        for form in self.forms:
            if (yield from form.is_call_start(reader, is_marked)):
                return True
            reader.pos = start
        return False

    def _is_bare_call(self, reader: TextReader, mark: str) -> Steps[bool]:
        """Return whether the opening `mark` of a form, which was read, begins a call. Then go back to it."""
        end, start, is_bare = reader.pos, reader.pos - len(mark), False
        reader.pos = start
        for form in self.forms:
            is_bare = is_bare or (yield from form.is_call_start(reader, False))
            reader.pos = start
        reader.pos = start if is_bare else end
        return is_bare

    def _parse_section(self, reader: TextReader, tools: Mapping[str, Tool], max_calls: int) -> Steps[int]:
        """Yield the calls behind a mark; return their number."""
        yield from reader.skip_space()
        is_list = not (yield from reader.is_at_mark()) and (yield from reader.skip("["))
        count, goes_on = 0, True
        while goes_on:
            yield from reader.skip_space()
            start = reader.pos
            form = yield from self._find_form(reader)
            if form is None or not (yield from form.parse_call(reader, tools)):
                is_item = is_list and form is not None and form.begin == "{"
                goes_on = is_item and (yield from self._skip_item(reader, start))
                if reader.pos:
                    yield TextDelta(reader.consume())
                goes_on = goes_on or (form is not None and (yield from self._skip_to_call(reader, form)))
                continue
            count += 1
            goes_on = yield from self._read_call_end(reader, form, is_list, count < max_calls)
        return count

    def _find_form(self, reader: TextReader) -> Steps[CallForm | None]:
        """Return the form whose opening comes next."""
        start = reader.pos
        for form in sorted(self.forms, key=lambda form: -len(form.begin)):
            is_next = yield from reader.skip(form.begin)
            reader.pos = start
            if is_next:
                return form
        return None

    def _read_call_end(
        self, reader: TextReader, form: CallForm, is_list: bool, may_go_on: bool
    ) -> Steps[bool]:
        """Read the marks and separators behind a call; return whether another call may follow."""
        reader.consume()
        yield from self._skip_strays(reader, form)
        if may_go_on and (yield from reader.skip_any((",", ";"))):
            return True
        if is_list and (yield from reader.skip("]")):
            reader.consume()
            yield from reader.skip_space()
        if self.end and (yield from reader.skip(self.end)):
            yield from self._skip_more_ends(reader)
            return False
        if self.is_loose:
            return may_go_on and (yield from reader.has_more())
        start = reader.pos
        if may_go_on and form.begin and (yield from reader.skip(form.begin)):
            reader.pos = start
            return True
        reader.pos = 0
        return may_go_on and (yield from self._skip_to_call(reader, form))

    def _skip_item(self, reader: TextReader, start: int) -> Steps[bool]:
        """Read the object of a list from `start` on; return whether another may follow."""
        reader.pos = start
        yield from reader.scan_value(JsonScan())
        yield from reader.skip_space()
        return (yield from reader.skip_any((",", ";")))

    def _skip_to_call(self, reader: TextReader, form: CallForm) -> Steps[bool]:
        """Yield the text up to the next opening of a form, if the section has one; return whether it does.
        Returns False for formats whose calls may stand without a section: `parse_events` looks for each
        call."""
        if self.has_bare_calls or form.begin not in form.marks:
            return False
        mark = yield from yield_text_before(
            reader, (form.begin, *self._section_marks, *filter(None, [self.end]))
        )
        reader.pos = 0
        return mark == form.begin

    def _skip_more_ends(self, reader: TextReader) -> Steps[None]:
        """Read repetitions of the mark `end`, which some models write."""
        is_end = True
        while is_end:
            reader.consume()
            yield from reader.skip_space()
            is_end = yield from reader.skip(self.end)
        reader.pos = 0

    def _skip_strays(self, reader: TextReader, form: CallForm) -> Steps[None]:
        """Read white space, and a call's `strays` if a mark, a separator or the end of the text follows
        them."""
        yield from reader.skip_space()
        start = reader.pos
        while (yield from reader.skip_any(form.strays)):
            yield from reader.skip_space()
        if (yield from reader.ends_in_mark(*self.marks)):
            reader.pos = len(reader.text)
        elif (yield from reader.peek()) not in (",", ";", "]") and not (yield from reader.is_at_mark()):
            reader.pos = start
        if reader.pos > start:
            reader.consume()


def join_text_patterns(texts: Iterable[str]) -> str:
    """Return a pattern of some texts; without one it matches nothing."""
    return "|".join(map(re.escape, texts)) or "(?!)"


def join_prefix_patterns(texts: Iterable[str]) -> str:
    """Return a pattern of the beginnings of some texts; without one it matches nothing."""
    return join_text_patterns(text[:length] for text in texts for length in range(1, len(text)))


def yield_text_before(reader: TextReader, marks: tuple[str, ...]) -> Steps[str]:
    """Yield the text before the first of some marks, and read the mark. Return the mark, "" if none comes.
    White space before the mark is not yielded."""
    while True:
        positions = [(reader.text.find(mark), mark) for mark in marks if mark in reader.text]
        pos, mark = min(positions, default=(-1, ""))
        end = pos if mark else len(reader.text) - overlap_length(reader.text, marks)
        if num_kept := len(reader.text[:end].rstrip()):
            reader.pos = num_kept
            yield TextDelta(reader.consume())
        elif mark or reader.is_over:
            reader.pos = pos + len(mark) if mark else 0
            return mark
        else:
            yield None


def yield_rest(reader: TextReader, is_after_call: bool) -> Steps[None]:
    """Yield all further text. If `is_after_call` (calls came before), drop the white space at its end."""
    while True:
        holds_space = is_after_call or not reader.is_over
        if num_kept := len(reader.text.rstrip() if holds_space else reader.text):
            reader.pos = num_kept
            yield TextDelta(reader.consume())
        elif reader.is_over:
            return
        else:
            yield None


class ToolParser:
    """Parses a message's text as it arrives; `is_several` allows more than one call."""

    def __init__(self, format: ToolFormat, tools: Iterable[Tool], allows_parallel_calls: bool = True):
        self._reader = TextReader(format.marks, format.is_before_call)
        self._held = ""  # arguments that end in what may be half of an escape
        known = {tool.name: tool for tool in tools}
        self._events = format.parse_events(self._reader, known, MAX_CALLS if allows_parallel_calls else 1)

    def parse_chunk(self, text: str, at_end: bool = False) -> list[ParserEvent]:
        self._reader.text += text
        self._reader.is_over = at_end
        events: list[ParserEvent] = []
        for event in self._events:
            if event is None:
                break
            events += self._replace_surrogates(event)
        return events

    def _replace_surrogates(self, event: ParserEvent) -> Iterator[ParserEvent]:
        """Yield an event, with lone surrogates in arguments replaced: no client could read them."""
        if isinstance(event, ToolCallArguments):
            text = self._held + event.text
            end = find_open_escape(text)
            self._held = text[end:]
            if end:
                yield ToolCallArguments(replace_lone_surrogates(text[:end]))
            return
        if isinstance(event, ToolCallEnd) and self._held:
            yield ToolCallArguments(replace_lone_surrogates(self._held))
            self._held = ""
        yield event

"""Forms of a tool call: an object of JSON, a name before an object of JSON, and parameters between tags."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from .argument_writer import ArgumentWriter
from .lark import Lark, quote_json
from .literals import QUOTES
from .parameter_terms import check_parameter_names, value_terms
from .stream_reader import (
    JsonScan,
    Steps,
    TextReader,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from .tool import Tool

ARGUMENT_KEYS = ("arguments", "parameters")
CALL_NUMBER = re.compile(r":\d+$")
TagPair = tuple[str, str]


class CallForm(Protocol):
    """A form in which a call is written; each call begins with `begin`.

    prefix: text that may stand before its name
    strays: texts that may be left over behind a call
    marks: texts that stand only around calls and their parts
    """

    @property
    def begin(self) -> str: ...
    @property
    def prefix(self) -> str: ...
    @property
    def strays(self) -> tuple[str, ...]: ...
    @property
    def marks(self) -> tuple[str, ...]: ...

    def is_call_start(self, reader: TextReader, is_marked: bool) -> Steps[bool]:
        """Return whether a call, or a part of one behind a mark, certainly begins here. `is_marked`: the mark
        of a section of calls stands before."""
        ...

    def parse_call(self, reader: TextReader, tools: Mapping[str, Tool]) -> Steps[bool]:
        """Yield the events of a call, if one comes next, up to its end or the end of the text. Return whether
        one came; without one, the text that was read stays in the reader."""
        ...

    def grammar_terms(self, tool: Tool, lark: Lark) -> str:
        """Return terms of a grammar for a call of a tool."""
        ...


@dataclass(frozen=True)
class JsonCall:
    """An object of JSON, as `{"name": "f", "arguments": {"x": 1}}`, with its keys in any order.

    name_key: key of the function's name
    arguments_key: key of its arguments; `arguments` and `parameters` are read too
    id_key: key of a number that is written first and ignored when it is read; "" without one

    Other keys are ignored.
    """

    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""
    begin: str = "{"
    prefix: str = ""
    strays: tuple[str, ...] = ("}",)
    marks: tuple[str, ...] = ()

    def is_call_start(self, reader: TextReader, is_marked: bool) -> Steps[bool]:
        if not is_marked or not (yield from reader.skip("{")):
            return False
        yield from reader.skip_space()
        return (yield from reader.peek()) == '"'  # inside of a string it would be an escape

    def parse_call(self, reader: TextReader, tools: Mapping[str, Tool]) -> Steps[bool]:
        if not (yield from reader.skip("{")):
            return False
        name, arguments = None, "{}"
        while (key := (yield from self._read_key(reader))) is not None:
            if key in (self.arguments_key, *ARGUMENT_KEYS):
                if (yield from reader.peek()) != "{":
                    return False
                if name is not None:
                    yield from self._parse_arguments(reader, name)
                    return True
                arguments = yield from reader.read_json()
            elif key == self.name_key:
                name = decode_json_string((yield from reader.read_json()))
                if name not in tools:
                    return False
            else:
                yield from reader.read_json()
        if name is None or not (yield from reader.skip("}")):
            return False
        yield from (ToolCallStart(name), ToolCallArguments(arguments), ToolCallEnd())
        return True

    def _read_key(self, reader: TextReader) -> Steps[str | None]:
        """Return the next key of an object, if one comes."""
        yield from reader.skip_space()
        if (yield from reader.skip(",")):
            yield from reader.skip_space()
        if (yield from reader.peek()) != '"':
            return None
        key = decode_json_string((yield from reader.read_json()))
        yield from reader.skip_space()
        is_key = yield from reader.skip(":")
        yield from reader.skip_space()
        return key if is_key else None

    def _parse_arguments(self, reader: TextReader, name: str) -> Steps[None]:
        """Yield the arguments of a call whose name is known, and the end of its object."""
        reader.consume()
        yield ToolCallStart(name)
        yield from reader.yield_arguments()
        end = reader.pos
        while (yield from self._read_key(reader)) is not None:
            yield from reader.read_json()
        if not (yield from reader.skip("}")):
            reader.pos = end
        yield ToolCallEnd()

    def grammar_terms(self, tool: Tool, lark: Lark) -> str:
        number = f'{lark.text_terms(f"{quote_json(self.id_key)}: ")} /"[0-9]"/ ", "' if self.id_key else ""
        head = lark.text_terms(
            f"{quote_json(self.name_key)}: {quote_json(tool.name)}, {quote_json(self.arguments_key)}: "
        )
        return f'"{{" {number} {head} {lark.json_term(tool.arguments_schema)} "}}"'


def decode_json_string(text: str) -> str | None:
    """Return the value of a JSON string; None if it is none."""
    try:
        return msgspec.json.decode(text, type=str)
    except msgspec.DecodeError:
        return None


@dataclass(frozen=True)
class NamedJsonCall:
    """A name before an object of JSON, as `f[ARGS]{"x": 1}`.

    begin: text before the name
    separators: texts that may stand between name and arguments; the first one is written
    end: text behind the arguments
    section_ends: other texts that may end a section of calls
    prefix: of names
    is_numbered: names have a number (`functions.f:0`), and the whole is the call's id
    id_mark: text before an id that may follow the name
    """

    begin: str = ""
    separators: tuple[str, ...] = ("",)
    end: str = ""
    prefix: str = ""
    is_numbered: bool = False
    id_mark: str = ""
    section_ends: tuple[str, ...] = ()

    @property
    def strays(self) -> tuple[str, ...]:
        return tuple(filter(None, ("}", self.end.strip(), *self.section_ends)))

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin, self.end.strip(), *self.section_ends)))

    def is_call_start(self, reader: TextReader, is_marked: bool) -> Steps[bool]:
        if not is_marked and not self.begin:
            return False
        return (yield from self._read_head(reader)) is not None

    def parse_call(self, reader: TextReader, tools: Mapping[str, Tool]) -> Steps[bool]:
        head = yield from self._read_head(reader)
        if head is None or head.name not in tools:
            return False
        reader.consume()
        yield head
        yield from reader.yield_arguments()
        yield from reader.skip_space()
        if not (yield from reader.skip(self.end.strip())):
            reader.pos = 0
        yield ToolCallEnd()
        return True

    def _read_head(self, reader: TextReader) -> Steps[ToolCallStart | None]:
        """Return the beginning of a call, if it stands before an object."""
        if not (yield from reader.skip(self.begin)):
            return None
        word = yield from reader.read_while(is_name_character)
        name, id = word.removeprefix(self.prefix), None
        if self.is_numbered:
            name, id = CALL_NUMBER.sub("", name), word
        if name and self.id_mark and (yield from reader.skip(self.id_mark)):
            id = yield from reader.read_while(str.isalnum)
        yield from reader.skip_space()
        is_next = yield from reader.skip_any(mark.strip() for mark in self.separators)
        yield from reader.skip_space()
        is_object = name and is_next and (yield from reader.peek()) == "{"
        return ToolCallStart(name, id) if is_object else None

    def grammar_terms(self, tool: Tool, lark: Lark) -> str:
        number = '":" /[0-9]/ ' if self.is_numbered else ""
        name, separator = (
            lark.text_terms(self.begin + self.prefix + tool.name),
            lark.text_terms(self.separators[0]),
        )
        return (
            f"{name} {number}{separator} {lark.json_term(tool.arguments_schema)} {lark.text_terms(self.end)}"
        )


def is_name_character(character: str) -> bool:
    return character.isalnum() or character in "_-.:"


def is_key_character(character: str) -> bool:
    return character not in "<>{},;\"'\r\n"


@dataclass(frozen=True)
class TaggedCall:
    """Parameters between tags, as `<function=f><parameter=x>1</parameter></function>`.

    name_tags, key_tags, value_tags: text before and behind the name, a parameter's key, and its value
    end: text behind the call
    padding: text at both ends of a value
    space: text written between all of these; any white space is read
    """

    name_tags: TagPair
    key_tags: TagPair
    value_tags: TagPair
    end: str = ""
    padding: str = ""
    space: str = ""
    prefix: str = ""

    @property
    def begin(self) -> str:
        return self.name_tags[0].rstrip(QUOTES)

    @property
    def strays(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.value_tags[1], self.end)))

    @property
    def marks(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin, self.key_tags[0].rstrip(QUOTES), *self.strays)))

    def is_call_start(self, reader: TextReader, is_marked: bool) -> Steps[bool]:
        start = reader.pos
        if (
            not is_marked
            and (yield from self._skip_key_mark(reader))
            and (yield from self._read_key(reader))[0]
        ):
            return True
        reader.pos = start
        if not is_marked:
            return bool(self.begin) and (yield from self._is_bare_start(reader))
        if (yield from self._read_tag(reader, self.name_tags)) is None:
            return False
        return bool(self.begin) or (yield from reader.peek()) == "<"

    def _is_bare_start(self, reader: TextReader) -> Steps[bool]:
        """Return whether a call without a mark certainly begins here. It begins a line, and its arguments,
        their end or another line follow."""
        if not reader.is_line_start() or (yield from self._read_tag(reader, self.name_tags)) is None:
            return False
        space = yield from reader.skip_space()
        return "\n" in space or (yield from reader.skip_any((self.key_tags[0].rstrip(QUOTES), self.end)))

    def parse_call(self, reader: TextReader, tools: Mapping[str, Tool]) -> Steps[bool]:
        tool = tools.get((yield from self._read_tag(reader, self.name_tags)) or "")
        if tool is None:
            return False
        reader.consume()
        yield ToolCallStart(tool.name)
        arguments, is_whole = ArgumentWriter(), True
        while is_whole and (yield from self._skip_to_key(reader)):
            is_whole = yield from self._parse_parameter(reader, tool, arguments)
        yield from arguments.write_end(is_whole and (yield from self._read_arguments_end(reader)))
        yield ToolCallEnd()
        return True

    def _read_tag(self, reader: TextReader, tags: TagPair) -> Steps[str | None]:
        """Read a tag with a name, which may be in quotes; return the name, if there is one."""
        if not (yield from reader.skip(tags[0].rstrip(QUOTES))):
            return None
        yield from reader.skip_any(QUOTES)
        name = yield from reader.read_while(is_name_character)
        yield from reader.skip_any(QUOTES)
        yield from reader.skip_space()
        is_closed = yield from reader.skip(tags[1].strip(QUOTES + "\n"))
        is_certain = tags[1] or (yield from reader.has_more())
        return name if name and is_closed and is_certain else None

    def _skip_key_mark(self, reader: TextReader) -> Steps[bool]:
        return (yield from reader.skip(self.key_tags[0].rstrip(QUOTES)))

    def _skip_to_key(self, reader: TextReader) -> Steps[bool]:
        """Read up to the key of the next parameter; return whether there is one. Text between parameters is
        no part of any."""
        while True:
            yield from reader.skip_space()
            start = reader.pos
            yield from reader.skip_to_mark()
            if (yield from self._skip_key_mark(reader)):
                return True
            if not (yield from reader.skip(self.value_tags[1])):
                is_end = bool(self.end) and reader.text.startswith(self.end, reader.pos)
                reader.pos = reader.pos if is_end else start
                return False
            reader.consume()

    def _read_arguments_end(self, reader: TextReader) -> Steps[bool]:
        """Read the end of the arguments; return whether they have one: anything but the end of the text."""
        if self.end and (yield from reader.skip(self.end)):
            return True
        is_cut = yield from reader.ends_in_mark(*self.marks)
        reader.pos = 0
        return not is_cut

    def _parse_parameter(self, reader: TextReader, tool: Tool, arguments: ArgumentWriter) -> Steps[bool]:
        """Yield a parameter's argument when it is certain. Return whether the next parameter may follow: this
        one is whole, or it is malformed and dropped."""
        key, is_cut = yield from self._read_key(reader)
        if is_cut:
            reader.pos = 0
            return False
        if not key:
            return True
        text, is_whole = yield from self._read_value(reader, tool.may_be_string(key))
        reader.consume()
        yield from arguments.write_argument(key, self._value_to_json(tool, key, text, is_whole))
        return is_whole

    def _read_key(self, reader: TextReader) -> Steps[tuple[str, bool]]:
        """Read up to a parameter's value. Return its key, "" if the tag behind the key is missing; and
        whether the text ends before that is certain."""
        yield from reader.skip_any(QUOTES)
        key = (yield from reader.read_while(is_key_character)).strip()
        yield from reader.skip_any(QUOTES)
        yield from reader.skip_space()
        is_closed = yield from reader.skip(self.key_tags[1].strip(QUOTES + "\n"))
        is_cut = not is_closed and not (yield from reader.has_more())
        if self.value_tags[0]:
            yield from reader.skip_space()
            is_cut = is_cut or (yield from reader.ends_in_mark(self.value_tags[0]))
            is_closed = (yield from reader.skip(self.value_tags[0])) or is_closed
        return key if is_closed else "", is_cut

    def _read_value(self, reader: TextReader, may_be_string: bool) -> Steps[tuple[str, bool]]:
        """Read a value and the tag behind it; return its text, and whether it is whole. Without the tag it
        ends before the first mark."""
        start, mark = reader.pos, None
        is_over = not may_be_string and (yield from self._skip_json(reader))
        ends = [reader.pos] if is_over else []
        while not is_over and (yield from reader.skip_to_mark()):
            mark_pos = reader.pos
            if (yield from reader.skip(self.value_tags[1])):
                ends.append(reader.pos)
                is_over = yield from self._is_value_end(reader, start)
            else:
                mark = mark_pos if mark is None else mark
                is_over = yield from reader.is_at_call()
                ends = ends[:1] if is_over else ends
            reader.pos = mark_pos + 1
        if ends:
            reader.pos = ends[-1] if is_over else ends[0]
            text = reader.text[start : reader.pos - len(self.value_tags[1])]
            return text.removeprefix(self.padding).removesuffix(self.padding), True
        reader.pos = end = len(reader.text) if mark is None else mark
        is_whole = yield from reader.skip_any(reader.marks)
        reader.pos = end
        return reader.text[start:end].removeprefix(self.padding).removesuffix("\n"), is_whole

    def _skip_json(self, reader: TextReader) -> Steps[bool]:
        """Read an array or object, whose strings may have the tag of a value's end, and that tag behind it;
        return whether both come next."""
        start = reader.pos
        yield from reader.skip_space()
        if (yield from reader.peek()) in ("[", "{") and (yield from reader.scan_value(JsonScan())):
            yield from reader.skip_space()
            if (yield from reader.skip(self.value_tags[1])):
                return True
        reader.pos = start
        return False

    def _is_value_end(self, reader: TextReader, start: int) -> Steps[bool]:
        """Return whether the end tag that was read ends the value which began at `start`.

        It does if a mark or the end of the text follows. If a second end tag follows, it does unless the
        value has an opening tag of the same name.
        """
        yield from reader.skip_space()
        if (yield from reader.skip(self.value_tags[1])):
            tag = self.value_tags[1].replace("</", "<").removesuffix(">")
            return reader.text.find(tag, start, reader.pos) < 0
        return (yield from reader.is_at_mark())

    def _value_to_json(self, tool: Tool, key: str, text: str, is_whole: bool) -> str:
        """Return a value as JSON, or the beginning of its JSON if it is not whole."""
        if is_whole:
            return tool.read_argument(key, text)
        return quote_json(text)[:-1] if tool.may_be_string(key) else text.strip()

    def grammar_terms(self, tool: Tool, lark: Lark) -> str:
        """Return terms for a call: the parameters in their order. A parameter that is not required may be
        missing."""
        terms = [lark.text_terms(self.name_tags[0] + tool.name + self.name_tags[1] + self.space)]
        check_parameter_names(
            tool.grammar_parameters,
            lambda key: key == key.strip().strip(QUOTES) and all(map(is_key_character, key)),
        )
        for key, is_required in tool.grammar_parameters.items():
            term = lark.add_rule(self._parameter_terms(tool, key, lark))
            terms.append(term if is_required else f"{term}?")
        return " ".join([*terms, lark.text_terms(self.end)])

    def _parameter_terms(self, tool: Tool, key: str, lark: Lark) -> str:
        """Return terms for a parameter; a text may be any without the tag that ends it."""
        before, after = self.value_tags
        opening = lark.text_terms(self.key_tags[0] + key + self.key_tags[1] + before + self.padding)
        ending = self.padding + after
        if (terms := value_terms(tool, key, lark, after)) is None:
            value = lark.add_rule("/(?s:.*)/", f"[suffix={quote_json(ending)}]")
        else:
            value = f"{lark.add_alternatives(terms)} {lark.text_terms(ending)}"
        return f"{opening} {value} {lark.text_terms(self.space)}"

"""Forms of a tool call: an object of JSON, a name before an object of JSON, and parameters between tags."""

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from .lark import Lark, quoted
from .stream_reader import Steps, TextReader, ToolCallArguments, ToolCallEnd, ToolCallStart
from .tool import Tool, choices, read, refused, types_of

ARGUMENTS = ("arguments", "parameters")
NUMBERED = re.compile(r":\d+$")
Pair = tuple[str, str]


class CallForm(Protocol):
    """A form in which a call is written; each call begins with `opens`."""

    @property
    def opens(self) -> str: ...

    def call(self, reader: TextReader, tools: Mapping[str, Tool]) -> Steps[bool]:
        """Yield the events of a call, if one comes next, up to its end or that of the text. Without one, the
        text that was read stays in the reader."""
        ...

    def written(self, tool: Tool, lark: Lark) -> str:
        """Return terms of a grammar for a call of a tool."""
        ...


@dataclass(frozen=True)
class JsonCall:
    """An object of JSON, as `{"name": "f", "arguments": {"x": 1}}`. `name` and `arguments` are its keys, in
    any order; other keys are ignored, as that of a number, `id`, which is written first. Models also write
    `arguments` where their template says `parameters`."""

    name: str = "name"
    arguments: str = "arguments"
    id: str = ""
    opens: str = "{"

    def call(self, reader: TextReader, tools: Mapping[str, Tool]) -> Steps[bool]:
        if not (yield from reader.skip("{")):
            return False
        name, held = None, "{}"
        while (key := (yield from self._key(reader))) is not None:
            if key in (self.arguments, *ARGUMENTS):
                if (yield from reader.peek()) != "{":
                    return False
                if name is not None:
                    yield from self._called(reader, name)
                    return True
                held = yield from reader.value()
            elif key == self.name:
                name = decoded((yield from reader.value()))
                if name not in tools:
                    return False
            else:
                yield from reader.value()
        if name is None or not (yield from reader.skip("}")):
            return False
        yield from (ToolCallStart(name), ToolCallArguments(held), ToolCallEnd())
        return True

    def _key(self, reader: TextReader) -> Steps[str | None]:
        """Return the next key of an object, if one comes."""
        yield from reader.skip_space()
        if (yield from reader.skip(",")):
            yield from reader.skip_space()
        if (yield from reader.peek()) != '"':
            return None
        key = decoded((yield from reader.value()))
        yield from reader.skip_space()
        found = yield from reader.skip(":")
        yield from reader.skip_space()
        return key if found else None

    def _called(self, reader: TextReader, name: str) -> Steps[None]:
        """Yield the arguments of a call whose name is known, and the end of its object."""
        reader.consume()
        yield ToolCallStart(name)
        yield from reader.arguments()
        end = reader.at
        while (yield from self._key(reader)) is not None:
            yield from reader.value()
        if not (yield from reader.skip("}")):
            reader.at = end
        yield ToolCallEnd()

    def written(self, tool: Tool, lark: Lark) -> str:
        number = f'{lark.text(f"{quoted(self.id)}: ")} /"[0-9]"/ ", "' if self.id else ""
        named = lark.text(f"{quoted(self.name)}: {quoted(tool.name)}, {quoted(self.arguments)}: ")
        return f'"{{" {number} {named} {lark.json(tool.arguments)} "}}"'


def decoded(text: str) -> str | None:
    """Return the value of a JSON string; None if it is none."""
    try:
        return msgspec.json.decode(text, type=str)
    except msgspec.DecodeError:
        return None


@dataclass(frozen=True)
class NamedJsonCall:
    """A name before an object of JSON, as `f[ARGS]{"x": 1}`.

    opens: text before the name
    between: texts that may stand between name and arguments; the first one is written
    closes: text behind the arguments
    prefix: of names
    is_numbered: names have a number (`functions.f:0`), and the whole is the call's id
    id_mark: text before an id that may follow the name
    """

    opens: str = ""
    between: tuple[str, ...] = ("",)
    closes: str = ""
    prefix: str = ""
    is_numbered: bool = False
    id_mark: str = ""

    def call(self, reader: TextReader, tools: Mapping[str, Tool]) -> Steps[bool]:
        if not (yield from reader.skip(self.opens)):
            return False
        word = yield from reader.take_while(in_name)
        name, id = word.removeprefix(self.prefix), None
        if self.is_numbered:
            name, id = NUMBERED.sub("", name), word
        if name not in tools:
            return False
        if self.id_mark and (yield from reader.skip(self.id_mark)):
            id = yield from reader.take_while(str.isalnum)
        yield from reader.skip_space()
        is_next = yield from reader.skip_any(mark.strip() for mark in self.between)
        yield from reader.skip_space()
        if not is_next or (yield from reader.peek()) != "{":
            return False
        reader.consume()
        yield ToolCallStart(name, id)
        yield from reader.arguments()
        yield from reader.skip_space()
        if not (yield from reader.skip(self.closes.strip())):
            reader.at = 0
        yield ToolCallEnd()
        return True

    def written(self, tool: Tool, lark: Lark) -> str:
        number = '":" /[0-9]/ ' if self.is_numbered else ""
        name, between = lark.text(self.opens + self.prefix + tool.name), lark.text(self.between[0])
        return f"{name} {number}{between} {lark.json(tool.arguments)} {lark.text(self.closes)}"


def in_name(character: str) -> bool:
    return character.isalnum() or character in "_-.:"


@dataclass(frozen=True)
class TaggedCall:
    """Parameters between tags, as `<function=f><parameter=x>1</parameter></function>`.

    name, key, value: text before and behind the name, a parameter's key, and its value
    closes: text behind the call
    padding: text at both ends of a value
    space: text written between all of these; any white space is read
    """

    name: Pair
    key: Pair
    value: Pair
    closes: str = ""
    padding: str = ""
    space: str = ""

    @property
    def opens(self) -> str:
        return self.name[0]

    def call(self, reader: TextReader, tools: Mapping[str, Tool]) -> Steps[bool]:
        if not (yield from reader.skip(self.name[0])):
            return False
        tool = tools.get((yield from reader.take_while(in_name)))
        if tool is None or not (yield from reader.skip(self.name[1].strip())):
            return False
        reader.consume()
        yield ToolCallStart(tool.name)
        yield ToolCallArguments("{")
        separator = ""
        while (key := (yield from self._key(reader))) is not None:
            is_whole = yield from self._parameter(reader, tool, key, separator)
            if not is_whole:
                yield ToolCallEnd()
                return True
            separator = ", "
        yield ToolCallEnd()
        return True

    def _key(self, reader: TextReader) -> Steps[str | None]:
        """Return the key of the next parameter. Without one the arguments end, unless the text ends before
        that is certain."""
        yield from reader.skip_space()
        if self.closes and (yield from reader.skip(self.closes)):
            yield ToolCallArguments("}")
            return None
        is_cut = (yield from reader.stops_in(self.closes)) or (yield from reader.stops_in(self.key[0]))
        if (yield from reader.skip(self.key[0])):
            key, is_whole = yield from reader.until(self.key[1].strip())
            if self.value[0]:
                yield from reader.skip_space()
            if is_whole and (yield from reader.skip(self.value[0])):
                return key.strip()
            is_cut = not is_whole or (yield from reader.stops_in(self.value[0]))
        reader.at = 0
        if not is_cut:
            yield ToolCallArguments("}")
        return None

    def _parameter(self, reader: TextReader, tool: Tool, key: str, separator: str) -> Steps[bool]:
        """Yield a parameter as JSON; return whether it is complete."""
        text, is_whole = yield from reader.until(self.value[1])
        reader.consume()
        text = text.removeprefix(self.padding)
        before, schema = f"{separator}{quoted(key)}: ", tool.schema(key)
        if is_whole:
            yield ToolCallArguments(before + read(text.removesuffix(self.padding), schema, tool.parameters))
        elif "string" in types_of(schema, tool.parameters):
            yield ToolCallArguments(before + quoted(text)[:-1])
        else:
            yield ToolCallArguments(before + text)
        return is_whole

    def written(self, tool: Tool, lark: Lark) -> str:
        """Return terms for a call: the parameters in their order, those that are required always."""
        required = tool.arguments.get("required") or ()
        terms = [lark.text(self.name[0] + tool.name + self.name[1] + self.space)]
        for key in tool.properties:
            term = lark.rule(self._written(tool, key, lark))
            terms.append(term if key in required else f"{term}?")
        return " ".join([*terms, lark.text(self.closes)])

    def _written(self, tool: Tool, key: str, lark: Lark) -> str:
        """Return terms for a parameter; a text may be any without the tag that ends it."""
        schema, (before, after) = tool.schema(key), self.value
        opening = lark.text(self.key[0] + key + self.key[1] + before + self.padding)
        ending = self.padding + after
        if (texts := choices(schema, tool.parameters)) is not None:
            value = f"{lark.one_of(lark.text(text) for text in texts)} {lark.text(ending)}"
        elif "string" not in types_of(schema, tool.parameters):
            value = f"{lark.json(tool.rooted(schema))} {lark.text(ending)}"
        else:
            value = lark.rule("/(?s:.*)/", f"[suffix={quoted(ending)}]")
        return f"{opening} {value} {lark.text(self.space)}"


@dataclass(frozen=True)
class PythonCall:
    """A call as Python or, with values of JSON, OLMo 3 writes it, as `f(x=1, y=[True, None])`; both are read.

    words: values of JSON that are written as Python's
    """

    words: Mapping[str, str] = field(default_factory=dict)
    opens: str = ""

    def call(self, reader: TextReader, tools: Mapping[str, Tool]) -> Steps[bool]:
        name = yield from reader.take_while(in_name)
        if name not in tools or not (yield from reader.skip("(")):
            return False
        reader.consume()
        yield ToolCallStart(name)
        yield ToolCallArguments("{")
        separator = ""
        while (key := (yield from self._key(reader))) is not None:
            text, is_whole = yield from literal(reader)
            reader.consume()
            value = as_json(text) if is_whole else text
            yield ToolCallArguments(f"{separator}{quoted(key)}: {value}")
            separator = ", "
        yield ToolCallEnd()
        return True

    def _key(self, reader: TextReader) -> Steps[str | None]:
        """Return the next argument's name. Without one the arguments end, unless the text ends before."""
        yield from reader.skip_space()
        if (yield from reader.skip(",")):
            yield from reader.skip_space()
        key = yield from reader.take_while(in_name)
        yield from reader.skip_space()
        if key and (yield from reader.skip("=")):
            yield from reader.skip_space()
            return key
        is_closed = not key and (yield from reader.skip(")"))
        if is_closed or (yield from reader.more()):
            yield ToolCallArguments("}")
        if not is_closed:
            reader.at = 0
        return None

    def written(self, tool: Tool, lark: Lark) -> str:
        """Return terms for a call: the arguments in their order, those that are required always."""
        required, names = tool.arguments.get("required") or (), list(tool.properties)
        items = [lark.rule(f"{lark.text(f'{name}=')} {self._value(tool, name, lark)}") for name in names]
        tails, firsts = [""], list[str]()
        for name, item in zip(reversed(names), reversed(items), strict=True):
            next_one = f'", " {item}' if name in required else f'(", " {item})?'
            tails.append(lark.rule(f"{next_one} {tails[-1]}"))
        for i, name in enumerate(names):
            firsts.append(f"{items[i]} {tails[len(names) - 1 - i]}")
            if name in required:
                break
        else:
            firsts.append('""')
        return f'{lark.text(f"{tool.name}(")} {lark.one_of(firsts)} ")"'

    def _value(self, tool: Tool, name: str, lark: Lark) -> str:
        schema = tool.schema(name)
        kinds = types_of(schema, tool.parameters)
        if self.words and kinds <= {"boolean", "null"} and "enum" not in schema and "const" not in schema:
            words = ["true", "false"] * ("boolean" in kinds) + ["null"] * ("null" in kinds)
            return lark.one_of(lark.text(self.words[word]) for word in words)
        return lark.json(tool.rooted(schema))


PYTHON = {"true": "True", "false": "False", "null": "None"}


def literal(reader: TextReader) -> Steps[tuple[str, bool]]:
    """Read a literal of Python or JSON up to the comma or bracket behind it; return its text, and whether it
    is whole."""
    start, depth, quote, is_escaped = reader.at, 0, "", False
    while character := (yield from reader.peek()):
        if quote:
            quote = "" if character == quote and not is_escaped else quote
            is_escaped = character == "\\" and not is_escaped
        elif character in "\"'":
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}" and depth:
            depth -= 1
        elif character in ",)" and not depth:
            return reader.text[start : reader.at].strip(), True
        reader.at += 1
    return reader.text[start:], False


def as_json(text: str) -> str:
    """Return a literal as JSON; text that is none as a string."""
    try:
        json.loads(text, parse_constant=refused)
        return text
    except (ValueError, RecursionError):
        pass
    try:
        return json.dumps(ast.literal_eval(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return quoted(text)

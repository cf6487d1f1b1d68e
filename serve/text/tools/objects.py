"""Calls as objects of JSON: `{"name": "f", "arguments": {"x": 1}}`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from .incoming import Incoming, Steps, ToolCallArguments, ToolCallEnd, ToolCallStart
from .lark import Lark
from .tool import Tool

ARGUMENTS = ("arguments", "parameters")


@dataclass(frozen=True)
class Objects:
    """The keys of a call's name and of its arguments, which come in whichever order; others mean nothing, as
    that of a number, `id`, which is written first. Models also write `arguments` where they were told
    `parameters`."""

    name: str = "name"
    arguments: str = "arguments"
    id: str = ""
    opens: str = "{"

    def call(self, coming: Incoming, tools: Mapping[str, Tool]) -> Steps[bool]:
        """Gives out a call, if one comes next."""
        if not (yield from coming.skip("{")):
            return False
        name, held = None, "{}"
        while (key := (yield from self._key(coming))) is not None:
            if key in (self.arguments, *ARGUMENTS):
                if (yield from coming.peek()) != "{":
                    return False
                if name is not None:
                    yield from self._called(coming, name)
                    return True
                held = yield from coming.value()
            elif key == self.name:
                name = decoded((yield from coming.value()))
                if name not in tools:
                    return False
            else:
                yield from coming.value()
        if name is None or not (yield from coming.skip("}")):
            return False
        yield from (ToolCallStart(name), ToolCallArguments(held), ToolCallEnd())
        return True

    def _key(self, coming: Incoming) -> Steps[str | None]:
        """The next key of an object, if one comes."""
        yield from coming.blank()
        if (yield from coming.skip(",")):
            yield from coming.blank()
        if (yield from coming.peek()) != '"':
            return None
        key = decoded((yield from coming.value()))
        yield from coming.blank()
        found = yield from coming.skip(":")
        yield from coming.blank()
        return key if found else None

    def _called(self, coming: Incoming, name: str) -> Steps[None]:
        """The arguments of a call whose name is known, and the end of its object."""
        coming.given()
        yield ToolCallStart(name)
        yield from coming.arguments()
        end = coming.at
        while (yield from self._key(coming)) is not None:
            yield from coming.value()
        if not (yield from coming.skip("}")):
            coming.at = end
        yield ToolCallEnd()

    def written(self, tool: Tool, lark: Lark) -> str:
        """Terms for a call of a tool."""
        number = f'{lark.text(f"{quoted(self.id)}: ")} /"[0-9]"/ ", "' if self.id else ""
        named = lark.text(f"{quoted(self.name)}: {quoted(tool.name)}, {quoted(self.arguments)}: ")
        return f'"{{" {number} {named} {lark.json(tool.arguments)} "}}"'


def decoded(text: str) -> str | None:
    """What a string of JSON says, if it is one."""
    try:
        return msgspec.json.decode(text, type=str)
    except msgspec.DecodeError:
        return None


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)

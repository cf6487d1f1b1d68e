"""Calls as a name before an object of JSON: `f[ARGS]{"x": 1}`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from .incoming import Incoming, Steps, ToolCallEnd, ToolCallStart
from .lark import Lark
from .tool import Tool

NUMBERED = re.compile(r":\d+$")


def in_name(character: str) -> bool:
    return character.isalnum() or character in "_-.:"


@dataclass(frozen=True)
class Headed:
    """What stands before a name, one of what may stand between it and the arguments, and what stands behind
    them. Names may have a `prefix`; where they are numbered (`functions.f:0`) the whole is the call's id,
    else one may follow `id_mark`."""

    opens: str = ""
    between: tuple[str, ...] = ("",)
    closes: str = ""
    prefix: str = ""
    is_numbered: bool = False
    id_mark: str = ""

    def call(self, coming: Incoming, tools: Mapping[str, Tool]) -> Steps[bool]:
        """Gives out a call, if one comes next."""
        if not (yield from coming.skip(self.opens)):
            return False
        word = yield from coming.run(in_name)
        name, id = word.removeprefix(self.prefix), None
        if self.is_numbered:
            name, id = NUMBERED.sub("", name), word
        if name not in tools:
            return False
        if self.id_mark and (yield from coming.skip(self.id_mark)):
            id = yield from coming.run(str.isalnum)
        yield from coming.blank()
        is_next = yield from coming.skip_any(mark.strip() for mark in self.between)
        yield from coming.blank()
        if not is_next or (yield from coming.peek()) != "{":
            return False
        coming.given()
        yield ToolCallStart(name, id)
        yield from coming.arguments()
        yield from coming.blank()
        if not (yield from coming.skip(self.closes.strip())):
            coming.at = 0
        yield ToolCallEnd()
        return True

    def written(self, tool: Tool, lark: Lark) -> str:
        """Terms for a call of a tool."""
        number = '":" /[0-9]/ ' if self.is_numbered else ""
        name, between = lark.text(self.opens + self.prefix + tool.name), lark.text(self.between[0])
        return f"{name} {number}{between} {lark.json(tool.arguments)} {lark.text(self.closes)}"

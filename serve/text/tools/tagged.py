"""Calls as a name and parameters between tags: `<function=f><parameter=x>1</parameter></function>`."""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from .headed import in_name
from .incoming import Incoming, Steps, ToolCallArguments, ToolCallEnd, ToolCallStart
from .lark import Lark
from .tool import Tool
from .values import choices, read, types_of

Pair = tuple[str, str]


@dataclass(frozen=True)
class Tagged:
    """What stands around a name, around a parameter's key and around its value, and behind the call; in a
    value, `padding` stands at both ends. Between all of these `space` is written, and any is read."""

    name: Pair
    key: Pair
    value: Pair
    closes: str = ""
    padding: str = ""
    space: str = ""

    @property
    def opens(self) -> str:
        return self.name[0]

    def call(self, coming: Incoming, tools: Mapping[str, Tool]) -> Steps[bool]:
        """Gives out a call, if one comes next."""
        if not (yield from coming.skip(self.name[0])):
            return False
        tool = tools.get((yield from coming.run(in_name)))
        if tool is None or not (yield from coming.skip(self.name[1].strip())):
            return False
        coming.given()
        yield ToolCallStart(tool.name)
        yield ToolCallArguments("{")
        separator = ""
        while (key := (yield from self._key(coming))) is not None:
            is_whole = yield from self._parameter(coming, tool, key, separator)
            if not is_whole:
                yield ToolCallEnd()
                return True
            separator = ", "
        yield ToolCallEnd()
        return True

    def _key(self, coming: Incoming) -> Steps[str | None]:
        """The key of the next parameter. Where there is none the arguments end, unless the text does before
        anybody can tell."""
        yield from coming.blank()
        if self.closes and (yield from coming.skip(self.closes)):
            yield ToolCallArguments("}")
            return None
        is_cut = (yield from coming.stops_in(self.closes)) or (yield from coming.stops_in(self.key[0]))
        if (yield from coming.skip(self.key[0])):
            key, is_whole = yield from coming.until(self.key[1].strip())
            if self.value[0]:
                yield from coming.blank()
            if is_whole and (yield from coming.skip(self.value[0])):
                return key.strip()
            is_cut = not is_whole or (yield from coming.stops_in(self.value[0]))
        coming.at = 0
        if not is_cut:
            yield ToolCallArguments("}")
        return None

    def _parameter(self, coming: Incoming, tool: Tool, key: str, separator: str) -> Steps[bool]:
        """Gives out a parameter as JSON; whether all of it has come."""
        text, is_whole = yield from coming.until(self.value[1])
        coming.given()
        text = text.removeprefix(self.padding)
        before, schema = f"{separator}{json.dumps(key, ensure_ascii=False)}: ", tool.schema(key)
        if is_whole:
            yield ToolCallArguments(before + read(text.removesuffix(self.padding), schema, tool.parameters))
        elif "string" in types_of(schema, tool.parameters):
            yield ToolCallArguments(before + json.dumps(text, ensure_ascii=False)[:-1])
        else:
            yield ToolCallArguments(before + text)
        return is_whole

    def written(self, tool: Tool, lark: Lark) -> str:
        """Terms for a call of a tool: its parameters in their order, those that it requires always."""
        required = tool.arguments.get("required") or ()
        terms = [lark.text(self.name[0] + tool.name + self.name[1] + self.space)]
        for key in tool.properties:
            term = lark.rule(self._written(tool, key, lark))
            terms.append(term if key in required else f"{term}?")
        return " ".join([*terms, lark.text(self.closes)])

    def _written(self, tool: Tool, key: str, lark: Lark) -> str:
        """Terms for a parameter; a text may be any that does not have the tag in it that ends it."""
        schema, (before, after) = tool.schema(key), self.value
        opening = lark.text(self.key[0] + key + self.key[1] + before + self.padding)
        ending = self.padding + after
        if (texts := choices(schema, tool.parameters)) is not None:
            value = f"{lark.one_of(lark.text(text) for text in texts)} {lark.text(ending)}"
        elif "string" not in types_of(schema, tool.parameters):
            value = f"{lark.json(tool.rooted(schema))} {lark.text(ending)}"
        else:
            value = lark.rule("/(?s:.*)/", f"[suffix={lark.quoted(ending)}]")
        return f"{opening} {value} {lark.text(self.space)}"

"""Messages with calls of tools, written in each format from values, and what a parser makes of texts."""

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

from duetto.serve.text.tools.call_forms import CallForm, JsonCall, NamedJsonCall, TaggedCall
from duetto.serve.text.tools.formats import find_tool_format
from duetto.serve.text.tools.python_call import PythonCall
from duetto.serve.text.tools.stream_reader import ParserEvent, TextDelta, ToolCallArguments, ToolCallStart
from duetto.serve.text.tools.tool import Tool
from duetto.serve.text.tools.tool_parser import ToolFormat, ToolParser

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "share": {"type": "number"},
    "is_far": {"type": "boolean"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "tags": {"type": "array"},
    "place": {"type": "object"},
}
TOOLS = (Tool("f", {"properties": PROPERTIES}), Tool("go_to", {"properties": PROPERTIES}), Tool("now"))
TEXTS = ("a", 'O\'Neil "x"', "two\nlines", "a < b > c", "{[(", "}])", "é😀\u2028", "x, y=1", "<p>\\n</p>")
Call = tuple[str, dict[str, Any]]
Read = tuple[list[tuple[str, str]], str]  # names and arguments of calls, and the text beside them


def random_calls(seed: str, count: int) -> list[Call]:
    draw = random.Random(seed)

    def values() -> dict[str, Any]:
        text = draw.choice(TEXTS)
        return {
            "text": text, "count": draw.randint(-9, 999), "share": draw.choice([0.5, -1.25, 3]),
            "is_far": draw.random() < 0.5, "note": draw.choice([None, "z"]), "tags": [text, 1, [None]],
            "place": {draw.choice("xy"): draw.choice(TEXTS)},
        }  # fmt: skip

    names = [draw.choice(("f", "go_to", "now")) for _ in range(count)]
    chosen = [{k: v for k, v in values().items() if draw.random() < 0.7} for _ in names]
    return [(name, {} if name == "now" else given) for name, given in zip(names, chosen, strict=True)]


def as_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def write_call(form: CallForm, call: Call) -> str:
    name, given = call
    match form:
        case JsonCall():
            return f'{{"{form.name_key}": "{name}", "{form.arguments_key}": {as_text(given)}}}'
        case NamedJsonCall():
            number = ":0" if form.is_numbered else ""
            named = f"{form.begin}{form.prefix}{name}{number}{form.separators[0]}"
            return named + as_text(given) + form.end
        case TaggedCall():
            return tagged_call(form, call)
    assert isinstance(form, PythonCall)
    spell = repr if form.words else as_text
    return f"{name}({', '.join(f'{key}={spell(value)}' for key, value in given.items())})"


def tagged_call(form: TaggedCall, call: Call) -> str:
    name, given = call
    pieces = [form.name_tags[0] + name + form.name_tags[1] + form.space]
    for key, value in given.items():
        text = form.padding + (value if isinstance(value, str) else as_text(value)) + form.padding
        pieces.append(
            form.key_tags[0]
            + key
            + form.key_tags[1]
            + form.value_tags[0]
            + text
            + form.value_tags[1]
            + form.space
        )
    return "".join(pieces) + form.end


def write_message(format: ToolFormat, calls: Sequence[Call]) -> tuple[str, list[int]]:
    """A message with calls, and the positions at which each of them is complete."""
    before, after = format.begin + format.list_begin, format.list_end + format.end
    if format.is_bare:
        before = after = ""
    is_ended = format.separator is None and isinstance(format.forms[-1], TaggedCall)
    text, ends = "" if format.is_bare else "Look.", []
    for i, call in enumerate(calls):
        if format.separator is not None:
            text += format.separator if i else before
        else:
            text += (format.section_separator if i else "") + before
        text += write_call(format.forms[-1], call)
        ends.append(len(text) + len(after) * is_ended)
        text += after if format.separator is None else ""
    return text + (after if format.separator is not None else ""), ends


def read_message(name: str, text: str, cuts: Iterable[int] = (), tools: Iterable[Tool] = TOOLS) -> Read:
    """A text's calls and the rest of it, by the format `name`, where the text arrives cut into pieces."""
    parser, events, start = ToolParser(find_tool_format(name), tools), list[ParserEvent](), 0
    for cut in cuts:
        events += parser.parse_chunk(text[start:cut])
        start = cut
    events += parser.parse_chunk(text[start:], at_end=True)
    calls, rest = list[tuple[str, str]](), ""
    for event in events:
        if isinstance(event, TextDelta):
            rest += event.text
        elif isinstance(event, ToolCallStart):
            calls.append((event.name, ""))
        elif isinstance(event, ToolCallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    return calls, rest


def are_equal(read: tuple[str, str], call: Call) -> bool:
    try:
        return (read[0], json.loads(read[1])) == call
    except ValueError:
        return False

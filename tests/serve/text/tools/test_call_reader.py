"""Calls of tools told from text: by notation, however it is cut, and nothing is lost."""

import json
from typing import Any

import pytest
from cases.text.dialects import (
    ARGUMENTS,
    ASKED,
    CALL,
    CALLED,
    FAMILIES,
    SPELLED,
    TOKENS,
    TOOL,
    template,
)
from hypothesis import given
from hypothesis import strategies as st
from suite.marks import full_if

from duetto.checkpoints.dialects import find_tool_call_marks
from duetto.serve.text.tokenizer.chats.chat import render_chat
from duetto.serve.text.tools.formats import TOOL_FORMATS, find_template_format, find_tool_format
from duetto.serve.text.tools.stream_reader import (
    ParserEvent,
    TextDelta,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)
from duetto.serve.text.tools.tool import Tool
from duetto.serve.text.tools.tool_parser import ToolParser

RAIN = Tool("rain", TOOL["function"]["parameters"])
TYPED = Tool(
    "typed",
    {
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            "is_far": {"type": "boolean"},
            "place": {"$ref": "#/$defs/Place"},
            "kind": {"enum": ["1", "2"]},
        },
        "$defs": {"Place": {"type": "object"}},
    },
)
TOOLS = (RAIN, TYPED, Tool("now"))


def joined(events: list[ParserEvent]) -> list[ParserEvent]:
    """Neighbours of a kind as one."""
    found: list[ParserEvent] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, TextDelta) and isinstance(last, TextDelta):
            found[-1] = TextDelta(last.text + event.text)
        elif isinstance(event, ToolCallArguments) and isinstance(last, ToolCallArguments):
            found[-1] = ToolCallArguments(last.text + event.text)
        else:
            found.append(event)
    return found


def read(name: str, text: str, is_several: bool = True) -> list[ParserEvent]:
    return joined(ToolParser(find_tool_format(name), TOOLS, is_several).parse_chunk(text, at_end=True))


def call(name: str, arguments: str, id: str | None = None) -> list[ParserEvent]:
    return [ToolCallStart(name, id), ToolCallArguments(arguments), ToolCallEnd()]


HERMES = '<tool_call>\n{"name": "rain", "arguments": {"city": "O\\"}<"}}\n</tool_call>'
IN_HERMES = call("rain", '{"city": "O\\"}<"}')
NOW = call("now", "{}")
HARMONY = "<|channel|>commentary to="
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now"
BROKEN = '<tool_call>{"name": "now", "arguments": {"a": '


@pytest.mark.parametrize(
    ("name", "text", "events"),
    [
        ("hermes", f"Look:\n\n{HERMES}\n{HERMES}\n", [TextDelta("Look:"), *IN_HERMES, *IN_HERMES]),
        ("hermes", f"\n\n{HERMES}\nAnd?", [*IN_HERMES, TextDelta("\nAnd?")]),
        ("hermes", '<tool_call>{"arguments":{},"x":[1,{}],"name":"now"}</tool_call>', NOW),
        ("hermes", '<tool_call>{"name":"now"}\n{"name":"now"}</tool_call>', NOW * 2),
        ("llama3_json", '{"name": "now", "parameters": {}}; {"type": "function", "name": "now"}', NOW * 2),
        ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', NOW),
        ("llama3_json", 'So: {"name": "now"}', [TextDelta('So: {"name": "now"}')]),
        ("llama4_json", 'So: <|python_start|>{"name": "now"}<|python_end|>', [TextDelta("So:"), *NOW]),
        ("mistral", '[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{}[TOOL_CALLS]now{}',
         [*call("now", "{}", "abc123def"), *NOW]),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "now"}]', NOW * 2),
        ("deepseek_v3", f"{DEEPSEEK}\n```json\n{{}}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>", NOW),
        ("hunyuan_a13b", '<tool_calls>[{"name": "now"}, {"name": "now"}]</tool_calls>', NOW * 2),
        ("glm45", "<tool_call>now</tool_call>\n<tool_call>now\n</tool_call>", NOW * 2),
        ("qwen3_coder", "<tool_call><function=now></function></tool_call>", NOW),
        ("lfm2", "<|tool_call_start|>[now(), now( )]<|tool_call_end|>", NOW * 2),
        ("lfm2",
         "<|tool_call_start|>[rain(city='O\"(', b=[True, {'x': None}], c=\"a'\\\"\")]<|tool_call_end|>x",
         [*call("rain", '{"city": "O\\"(", "b": [true, {"x": null}], "c": "a\'\\""}'), TextDelta("x")]),
        ("olmo3",
         "Look.<function_calls>now()\nrain(city=\"a)b, c\", n=-1.5e3, x=true, y=what)\n</function_calls>",
         [TextDelta("Look."), *NOW,
          *call("rain", '{"city": "a)b, c", "n": -1.5e3, "x": true, "y": "what"}')]),
        ("olmo3", "<function_calls>snow()</function_calls>",
         [TextDelta("<function_calls>snow()</function_calls>")]),
        ("olmo3", "<function_calls>now() and</function_calls>", [*NOW, TextDelta(" and</function_calls>")]),
        ("openai", f"{HARMONY}functions.now <|constrain|>json<|message|>{{}}<|call|>", NOW),
        ("openai", f"<|start|>assistant{HARMONY}functions.now json<|message|>{{}}", NOW),
        ("openai", "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>", NOW),
        ("openai", f"So.<|start|>assistant{HARMONY}functions.snow<|message|>{{}}",
         [TextDelta(f"So.<|start|>assistant{HARMONY}functions.snow<|message|>{{}}")]),
    ],
)  # fmt: skip
def test_calls_by_notation(name, text, events):
    assert read(name, text) == joined(events)


TAGGED = [
    ("text", " 7\nx\n", '" 7\\nx\\n"'), ("count", "7", "7"), ("count", "many", '"many"'),
    ("share", "0.5", "0.5"), ("share", "None", "null"), ("is_far", "True", "true"), ("kind", "1", '"1"'),
    ("place", '{"x": [1]}', '{"x": [1]}'), ("place", "{'x'}", '"{\'x\'}"'), ("other", "[]", "[]"),
    ("share", "NaN", '"NaN"'),
]  # fmt: skip


@pytest.mark.parametrize(("key", "written", "value"), TAGGED)
def test_values_between_tags_have_the_types_of_the_schema(key, written, value):
    for name, text in {
        "qwen3_coder": f"<function=typed>\n<parameter={key}>\n{written}\n</parameter>\n</function>\n",
        "minimax_m2": f'<invoke name="typed"><parameter name="{key}">{written}</parameter></invoke>',
        "glm45": f"typed\n<arg_key>{key}</arg_key>\n<arg_value>{written}</arg_value>\n",
    }.items():
        text = find_tool_format(name).begin + text + find_tool_format(name).end
        assert read(name, text) == call("typed", f'{{"{key}": {value}}}'), name


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "snow", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "x"}</tool_call>'),
        ("hermes", "<tool_call> is how I call."),
        ("hermes", '<tool_call>{"name": "now'),
        ("hermes", "A <tool_cal"),
        ("llama3_json", ' {"name": "snow", "parameters": {}} '),
        ("llama3_json", '[{"a": 1}]'),
        ("mistral", "[TOOL_CALLS]snow[ARGS]{}"),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0{"),
        ("qwen3_coder", "<tool_call>\n<function=now\n"),
    ],
)
def test_what_is_no_call_of_a_tool_stays_text(name, text):
    assert read(name, text) == [TextDelta(text)]


@pytest.mark.parametrize(
    ("name", "text", "events"),
    [
        ("hermes", BROKEN + '"b', [ToolCallStart("now"), ToolCallArguments('{"a": "b'), ToolCallEnd()]),
        ("hermes", BROKEN + "</tool_call>x",
         [ToolCallStart("now"), ToolCallArguments('{"a": '), ToolCallEnd(), TextDelta("x")]),
        ("olmo3", '<function_calls>rain(city="Par',
         [ToolCallStart("rain"), ToolCallArguments('{"city": "Par'), ToolCallEnd()]),
        ("olmo3", '<function_calls>rain(city="Paris", ',
         [ToolCallStart("rain"), ToolCallArguments('{"city": "Paris"'), ToolCallEnd(), TextDelta(", ")]),
        ("qwen3_coder", "<tool_call><function=typed><parameter=text>\na\"b",
         [ToolCallStart("typed"), ToolCallArguments('{"text": "a\\"b'), ToolCallEnd()]),
        ("qwen3_coder", "<tool_call><function=typed><parameter=count>1</parameter>?",
         [*call("typed", '{"count": 1}'), TextDelta("?")]),
        ("qwen3_coder", "<tool_call><function=typed><parameter=cou",
         [ToolCallStart("typed"), ToolCallArguments("{"), ToolCallEnd(), TextDelta("<parameter=cou")]),
    ],
)  # fmt: skip
def test_cut_off_or_broken_calls_keep_their_text(name, text, events):
    assert read(name, text) == events


def test_where_one_call_is_allowed_the_others_are_text():
    assert read("hermes", HERMES + "\n" + HERMES, False) == [*IN_HERMES, TextDelta("\n" + HERMES)]


MARKS = sorted(
    {
        mark
        for own in map(find_tool_format, TOOL_FORMATS)
        for mark in (own.begin, own.end, *own.other_begins)
        if mark
    }
)
FRAGMENTS = [
    *MARKS, *"{}[]\":,;\\ \n<a", '"name": ', '"arguments": ', '{"name": "now", "arguments": {}}', "now",
    "functions.now:0", "functions.now", "<|constrain|>json<|message|>",
    "<function=typed>", "<parameter=text>", "</parameter>", "</function>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    HERMES, "[ARGS]",
    "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", '<invoke name="typed">', '<parameter name="count">', "1",
]  # fmt: skip


# Notations whose calls are of the form of another notation.
LIKE_OTHERS = (
    "deepseek_v31", "glm45", "granite", "hunyuan_a13b", "llama3_json", "minimax_m2", "mistral_list",
    "seed_oss",
)  # fmt: skip


@full_if(lambda name: name in LIKE_OTHERS)
@pytest.mark.parametrize("name", TOOL_FORMATS)
@given(parts=st.lists(st.sampled_from(FRAGMENTS), max_size=12), data=st.data())
def test_how_a_text_is_cut_makes_no_difference(name, parts, data):
    begin = find_tool_format(name).begin if data.draw(st.booleans()) else ""
    text = begin + "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    whole = read(name, text)
    reader, found = ToolParser(find_tool_format(name), TOOLS), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += reader.parse_chunk(text[start:end])
    assert joined(found + reader.parse_chunk("", at_end=True)) == whole
    if not any(isinstance(event, ToolCallStart) for event in whole):
        assert whole == ([TextDelta(text)] if text else [])


@pytest.mark.parametrize("family", [name for name, about in FAMILIES.items() if about.calls in TOOL_FORMATS])
def test_calls_are_found_in_what_templates_write(family):
    """Two of them, or one where a message has one, whose arguments are as they were."""
    source, calls = template(family), [CALL, {**CALL, "id": "functions.rain:1"}]
    if FAMILIES[family].as_text:
        calls = [{**one, "function": SPELLED} for one in calls]
    message = {**CALLED, "reasoning": None, "tool_calls": calls}
    whole = render_chat(source, [ASKED, message], **TOKENS, add_generation_prompt=False)
    notation = find_template_format(source)
    assert notation is not None and find_tool_call_marks(source).begin == notation.begin
    text = whole[whole.index(notation.begin) :].removesuffix(FAMILIES[family].ends)
    found: list[Any] = joined(ToolParser(notation, [RAIN]).parse_chunk(text, at_end=True))
    count = 1 if notation.is_single else 2
    assert [type(event) for event in found] == [ToolCallStart, ToolCallArguments, ToolCallEnd] * count
    assert [json.loads(event.text) for event in found[1::3]] == [ARGUMENTS] * count
    ids = [event.id for event in found[::3]]
    assert ids == (["functions.rain:0", "functions.rain:1"] if family == "kimi_k2" else [None] * count)

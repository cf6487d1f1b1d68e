"""Calls of tools that models write wrongly, or do not end."""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

import pytest
from cases.text.calls import TOOLS, are_equal, random_calls, read_message, write_message
from suite.marks import full_if

from duetto.serve.text.tools.call_forms import JsonCall, TaggedCall
from duetto.serve.text.tools.formats import TOOL_FORMATS, find_tool_format
from duetto.serve.text.tools.literals import value_to_json
from duetto.serve.text.tools.tool import Tool

NEXT = ("f", {"text": "next", "count": 7})
ABC, COUNT = "<parameter=text>\nabc\n</parameter>\n", "<parameter=count>\n5\n</parameter>\n"
HERMES, HERMES_NOW = '<tool_call>\n{"name": "f", "arguments": ', '<tool_call>{"name": "now"}</tool_call>'
KIMI = "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{}<|tool_call_end|>"
LFM2, HARMONY = "<|tool_call_start|>[", '<|channel|>analysis to=functions.f json<|message|>{"text": "abc"}'


def qwen(*inside: str, closes: str = "</function>\n</tool_call>") -> str:
    return "<tool_call>\n<function=f>\n" + "".join(inside) + closes


def glm(*inside: str) -> str:
    return "<tool_call>f\n" + "".join(inside) + "\n</tool_call>"


def minimax(*inside: str, closes: str = "</invoke>\n</minimax:tool_call>") -> str:
    return '<minimax:tool_call>\n<invoke name="f">' + "".join(inside) + closes


SECOND, GLM_SECOND = qwen(COUNT), glm("<arg_key>count</arg_key>\n<arg_value>5</arg_value>")
ONE, NOW = ("f", {"text": "abc"}), ("now", {})
BOTH, TWO = [("f", {"text": "abc", "count": 5})], [ONE, ("f", {"count": 5})]
TAG_IS_MISSING = [
    ("qwen3_coder", qwen("<parameter=text>\nabc\n") + "\n" + SECOND, TWO),
    ("qwen3_coder", qwen('<parameter=place>\n{"a": 1}\n'), [("f", {"place": {"a": 1}})]),
    ("qwen3_coder", qwen("<parameter=text>\nabc\n", COUNT), BOTH),
    ("qwen3_coder", qwen("<parameter=text>\nabc\n", closes="</tool_call>\nSo:\n") + SECOND, TWO),
    ("qwen3_coder", qwen("<parameter=text>\nabc\n", closes=SECOND), TWO),
    ("qwen3_coder", qwen(ABC, closes="</tool_call>\n") + SECOND, TWO),
    ("qwen3_coder", qwen(ABC).removeprefix("<tool_call>\n"), [ONE]),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=f>\n<parameter=text>abc\n</function>\n</seed:tool_call>",
        [ONE],
    ),
    ("minimax_m2", minimax('<parameter name="text">abc\n', '</invoke>\n<invoke name="now">\n'), [ONE, NOW]),
    ("minimax_m2", '<invoke name="now">\n</invoke>', [NOW]),
    ("glm45", glm("<arg_key>text</arg_key>\n<arg_value>abc") + "\n" + GLM_SECOND, TWO),
    ("glm45", glm("<arg_key>text</arg_key><arg_value>abc", GLM_SECOND.removeprefix("<tool_call>f\n")), BOTH),
    ("glm45", glm("<arg_key>text</arg_key>abc</arg_value>"), [ONE]),
    ("glm45", glm("<arg_key>text\n<arg_value>abc</arg_value>"), [ONE]),
]
KEY_IS_NONE = [
    ("qwen3_coder", qwen(ABC, "<parameter=\necho\n</parameter>\n"), [ONE]),
    ("qwen3_coder", qwen("<parameter=tags: [1]\n</parameter>\n", ABC), [ONE]),
    ("qwen3_coder", qwen("<parameter=text=\n</parameter>\n"), [("f", {})]),
    ("qwen3_coder", qwen("<parameter=>\na\n</parameter>\n"), [("f", {})]),
]
SPELT_OTHERWISE = [
    ("qwen3_coder", "<function=\"f\">\n<parameter='text' >\nabc\n</parameter>\n</function>", [ONE]),
    (
        "minimax_m2",
        "<minimax:tool_call><invoke name='f'><parameter name='text'>abc</parameter></invoke>",
        [ONE],
    ),
    (
        "qwen3_coder",
        qwen("<parameter=tags>\n['a', (1, None)]\n</parameter>"),
        [("f", {"tags": ["a", [1, None]]})],
    ),
    ("qwen3_coder", qwen("<parameter=text>\na\n</parameter>\n", ABC), [ONE]),
    ("lfm2", LFM2 + "f('abc', 5), now('x')]<|tool_call_end|>", [*BOTH, NOW]),
    ("lfm2", LFM2 + "f(text='a', text='abc')]<|tool_call_end|>", [ONE]),
    ("lfm2", LFM2 + "f(text='a\nb', tags=['a\nb'])]", [("f", {"text": "a\nb", "tags": ["a\nb"]})]),
    ("openai", HARMONY, [ONE]),
    ("kimi_k2", f"<|tool_call_section_begin|>{KIMI}<|tool_call_section_end|>", [NOW]),
]
BRACKETS = [
    ("hermes", HERMES + '{"text": "abc"}}}\n</tool_call>\n' + HERMES_NOW, [ONE, NOW]),
    ("hermes", HERMES + '{"text": "abc"}\n</tool_call>\n' + HERMES_NOW, [ONE, NOW]),
    ("llama3_json", '{"name": "now", "parameters": {}}}', [NOW]),
]
TAGS_BELONG = [
    ("hermes", HERMES + '{"text": "a </tool_call> b"}}', [("f", {"text": "a </tool_call> b"})]),
    ("qwen3_coder", qwen(ABC.replace("b", " </tool_call> </function>")),
     [("f", {"text": "a </tool_call> </function>c"})]),
    ("minimax_m2", minimax('<parameter name="text"><parameter>\n1\n</parameter>\n</parameter>\n'),
     [("f", {"text": "<parameter>\n1\n</parameter>\n"})]),
    ("qwen3_coder", qwen(ABC.replace("b", " </parameter> b ")), [("f", {"text": "a </parameter> b c"})]),
    ("qwen3_coder", qwen(ABC + "</parameter>\n", COUNT), BOTH),
    ("minimax_m2", minimax('<parameter name="text">see </parameter> tag</parameter>\n'),
     [("f", {"text": "see </parameter> tag"})]),
    ("glm45", glm("<arg_key>text</arg_key>\n<arg_value>see </arg_value> tag</arg_value>"),
     [("f", {"text": "see </arg_value> tag"})]),
    ("qwen3_coder", qwen(ABC.replace("abc", "Use `<function=f>` and `</function>`.")),
     [("f", {"text": "Use `<function=f>` and `</function>`."})]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "calls"), TAG_IS_MISSING + KEY_IS_NONE + SPELT_OTHERWISE + BRACKETS + TAGS_BELONG
)
def test_what_is_meant_is_read_and_no_mark_is_left(name, text, calls):
    whole = read_message(name, text)
    assert [(called, json.loads(given)) for called, given in whole[0]] == calls
    assert whole[1] in ("", "\nSo:") and read_message(name, text, range(1, len(text))) == whole


@pytest.mark.parametrize("name", ["qwen3_coder", "seed_oss", "minimax_m2", "glm45"])
@pytest.mark.parametrize("place", [{"x": "%s %s"}, {"x": ['"%s%s', {}], "%s": "c"}, {"x": "%s%s\\"}])
def test_strings_of_json_may_have_tags_that_end_values(name, place):
    notation = find_tool_format(name)
    tag = next(form.value_tags[1] for form in notation.forms if isinstance(form, TaggedCall))
    place = json.loads(json.dumps(place).replace("%s", tag))
    calls = [
        ("f", {"tags": [f"<b>{tag}{notation.end}", "c"], "place": place, "count": 5}),
        ("f", {"place": place}),
    ]
    text = write_message(notation, calls)[0]
    whole = read_message(name, text)
    assert whole[1] == "Look." and all(map(are_equal, whole[0], calls)) and len(whole[0]) == 2
    assert read_message(name, text, range(1, len(text))) == whole


def test_an_unclosed_string_between_tags_ends_at_its_tag():
    text = qwen('<parameter=tags>\n["a\n</parameter>\n', COUNT) + '\nHe said "b".'
    calls = [("f", '{"tags": "[\\"a", "count": 5}')]
    assert read_message("qwen3_coder", text) == (calls, '\nHe said "b".')
    assert read_message("qwen3_coder", text, range(1, len(text))) == (calls, '\nHe said "b".')


@pytest.mark.parametrize("name", ["kimi_k2", "deepseek_v3", "deepseek_v31"])
@pytest.mark.parametrize(
    ("correct", "wrong", "read"),
    [("go_to", "unknown", []), ('"x", ', '"x", // c\n', [("go_to", '{"text": "x", ')])],
)
def test_a_failed_call_is_text_up_to_the_next_mark(name, correct, wrong, read):
    """The call of an unknown tool, or what stands behind a character that JSON has not."""
    calls = [("go_to", {"text": "x", "count": 1}), NOW, ("f", {"count": 5})]
    text = write_message(find_tool_format(name), calls)[0].replace(correct, wrong)
    whole = read_message(name, text)
    assert whole[0] == [*read, ("now", "{}"), ("f", '{"count": 5}')]
    assert '"count": 1}' in whole[1] and find_tool_format(name).end not in whole[1]
    assert read_message(name, text, range(1, len(text))) == whole


@pytest.mark.parametrize("name", ["granite", "hunyuan_a13b", "cohere_command", "mistral_list"])
def test_a_failed_call_of_a_list_of_json_is_text(name):
    form = find_tool_format(name).forms[-1]
    assert isinstance(form, JsonCall)
    calls = [("go_to", {"text": "}, {"}), NOW, ("go_to", {"count": 1}), ("f", {"count": 5})]
    text = write_message(find_tool_format(name), calls)[0].replace("go_to", "unknown")
    whole = read_message(name, text)
    assert whole[0] == [("now", "{}"), ("f", '{"count": 5}')]
    assert '{"text": "}, {"}},' in whole[1] and '{"count": 1}},' in whole[1]
    assert read_message(name, text, range(1, len(text))) == whole


def test_behind_a_section_a_mark_of_a_call_is_text():
    unknown = "<|tool_calls_section_begin|>" + KIMI.replace("now", "unknown") + "<|tool_calls_section_end|>"
    assert read_message("kimi_k2", unknown + KIMI) == ([], unknown + KIMI)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "Use `<function=f>` and `</function>` tags."),
        ("qwen3_coder", "Use <function=f>\n</function>."),
        ("qwen3_coder", "So:\n  <function=f> is a tag,\n<function=f>"),
        ("seed_oss", "<function=f> and </function>"),
        ("minimax_m2", 'Use <invoke name="f"></invoke>.'),
    ],
)
def test_tags_in_prose_are_no_calls(name, text):
    assert read_message(name, text) == read_message(name, text, range(1, len(text))) == ([], text)


@pytest.mark.parametrize("before", ["", "Use `<function=f>`.\n", "So:\n  ", SECOND, SECOND + "\n"])
@pytest.mark.parametrize("tags", [ABC + "</function>", "\n" + ABC, "</function>", " \n</function>"])
def test_a_call_without_a_mark_begins_a_line(before, tags):
    text = before + "<function=f>" + tags
    whole = read_message("qwen3_coder", text)
    assert len(whole[0]) == 1 + (SECOND in before) and whole[1] == before.removeprefix(SECOND).rstrip()
    assert read_message("qwen3_coder", text, range(1, len(text))) == whole


def test_an_unclosed_string_of_json_ends_before_the_next_call():
    text = HERMES + '{"text": "abc}}\n</tool_call>\n' + HERMES_NOW
    assert read_message("hermes", text)[0] == [("f", '{"text": "abc}}\n'), ("now", "{}")]


# Notations whose calls are of the form of another notation.
LIKE_OTHERS = (
    "deepseek_v31", "glm45", "hunyuan_a13b", "llama3_json", "minimax_m2", "mistral_list", "seed_oss",
)  # fmt: skip


@full_if(lambda name: name in LIKE_OTHERS)
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_call_that_is_cut_anywhere_keeps_what_there_is(name):
    """No part of a tag is in it, the calls before it are whole, and how it arrives makes no difference."""
    notation = find_tool_format(name)
    calls = random_calls(name, 1 if notation.is_single else 3)
    text, ends = write_message(notation, calls)
    halves = tuple(mark[:length] for mark in notation.marks for length in range(3, len(mark) + 1))
    for cut in range(len(text) + 1):
        read, rest = read_message(name, text[:cut])
        assert read_message(name, text[:cut], range(1, cut, 3)) == (read, rest), cut
        assert not any(given.endswith(halves) for _, given in read), cut
        complete = [call for call, end in zip(calls, ends, strict=True) if end <= cut]
        assert all(map(are_equal, read, complete)) and len(read) >= len(complete), cut


@pytest.mark.parametrize("name", [name for name in TOOL_FORMATS if not TOOL_FORMATS[name].is_bare])
def test_a_call_that_is_cut_anywhere_swallows_no_other(name):
    notation = find_tool_format(name)
    calls = random_calls(f"{name} again", 1 if notation.is_single else 2)
    text, ends = write_message(notation, calls)
    after = "\n" + write_message(notation, [NEXT])[0].removeprefix("Look.")
    for cut in range(len("Look." + notation.begin), len(text) + 1, 2):
        read, _ = read_message(name, text[:cut] + after)
        complete = [call for call, end in zip(calls, ends, strict=True) if end <= cut]
        assert all(map(are_equal, read, complete)), cut
        assert are_equal(read[-1], NEXT), cut


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("lfm2", LFM2 + r"f(text='\ud83d\ude00 \ud83d', place={'\udead': '\ud83d'})]",
         '{"text": "😀 \ufffd", "place": {"\ufffd": "\ufffd"}}'),
        ("qwen3_coder", qwen("<parameter=tags>\n['\\ud83d']\n</parameter>"), '{"tags": ["\ufffd"]}'),
        ("qwen3_coder", qwen("<parameter=text>\n\\ud83d\n</parameter>"), r'{"text": "\\ud83d"}'),
        ("hermes", HERMES + r'{"text": "\ud83d\ude00 \ud83d \\ud83d \ude00"}}',
         r'{"text": "\ud83d\ude00 \ufffd \\ud83d \ufffd"}'),
        ("hermes", HERMES + r'{"text": "\ud83d', r'{"text": "\ufffd'),
    ],
)  # fmt: skip
def test_arguments_have_no_half_of_a_surrogate_pair(name, text, arguments):
    whole = read_message(name, text)
    assert whole[0] == [("f", arguments)] and whole[0][0][1].encode()
    assert read_message(name, text, range(1, len(text))) == whole


def count_calls(work: Callable[[], object]) -> int:
    """Python functions that work enters."""
    count, before = 0, sys.getprofile()

    def observe(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(observe)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


@pytest.mark.parametrize(
    ("name", "begin", "repeated"),
    [
        ("qwen3_coder", qwen("<parameter=text>\n", closes=""), "</function>"),
        ("qwen3_coder", "", qwen("<parameter=text>\n", closes="")),
        ("qwen3_coder", qwen(closes=""), "<parameter=\n"),
        ("qwen3_coder", qwen(closes=""), "<parameter=a b>"),
        ("glm45", "<tool_call>f\n", "<arg_key>q<arg_value>"),
        ("hermes", "", '<tool_call>{"arguments": {'),
        ("lfm2", "", "<|tool_call_start|>[f(text='"),
        ("mistral", "", '[TOOL_CALLS]f[ARGS]{"text": "'),
        ("lfm2", LFM2, "f("),
        ("qwen3_coder", qwen("<parameter=text>\n", closes=""), "</parameter> x"),
        ("qwen3_coder", "", "<function=f> x"),
        ("qwen3_coder", "", qwen('<parameter=tags>\n["a\n</parameter>\n')),
        ("qwen3_coder", qwen('<parameter=tags>\n["a\n', closes=""), "</parameter> x"),
        ("hunyuan_a13b", "<tool_calls>[", '{"name": "unknown", "arguments": {}}, '),
        ("hunyuan_a13b", "", '<tool_calls>[{"name": "unknown", "arguments": {'),
        ("kimi_k2", "<|tool_calls_section_begin|>", KIMI.replace("now", "unknown")),
    ],
)
def test_long_broken_messages_take_linear_time(name, begin, repeated):
    few, many = (count_calls(partial(read_message, name, begin + repeated * times)) for times in (50, 400))
    assert many < 10 * few


@pytest.mark.parametrize("end", ["", "\\"])
def test_a_string_without_its_end_is_read_once(end):
    """Where each quote in it were tried as another beginning, it would take minutes."""
    text, start = "['" + "\\'" * 100_000 + end, time.process_time()
    assert json.loads(value_to_json(text)) == text
    assert time.process_time() - start < 5


def test_a_key_may_have_spaces():
    tools = (Tool("f", {"properties": {"my key": {"type": "integer"}}}), *TOOLS[1:])
    text = qwen("<parameter=my key>\n5\n</parameter>\n")
    assert read_message("qwen3_coder", text, tools=tools)[0] == [("f", '{"my key": 5}')]


def test_a_name_that_may_go_on_is_text():
    assert read_message("glm45", "<tool_call>now") == ([], "<tool_call>now")

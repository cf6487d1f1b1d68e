"""What bodies say of an output's form, under all the names that there are for it."""

from typing import Any

import pytest

from duetto.sampling.structured import StructuredOutputsParams
from duetto.serve.jobs.batch.lines import read_line_task
from duetto.serve.text.openai.errors import RequestError
from duetto.serve.text.openai.fields import parse_allowed_tools
from duetto.serve.text.openai.responses import parse_response_task
from duetto.serve.text.openai.tasks import parse_task

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
OPENAI = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
CHAT = {"messages": [{"role": "user", "content": "x"}]}


def asked(body: dict[str, Any]) -> StructuredOutputsParams | None:
    """Of a completion and of a chat, alone and in a line of a batch."""
    completion, chat = {"prompt": "x"} | body, CHAT | body
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    tasks = [
        parse_task("completion", None, completion, {}, None),
        parse_task("chat", None, chat, {}, None),
        read_line_task(line, {}, 0),
    ]
    first, *others = [task.params.structured_outputs for task in tasks]
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize(
    ("body", "meant"),
    [
        ({"response_format": OPENAI}, {"json": SCHEMA}),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"structured_outputs": {"regex": "a+", "json": None}}, {"regex": "a+"}),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, {"regex": "a"}),
        ({"guided_json": SCHEMA}, {"json": SCHEMA}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ],
)  # fmt: skip
def test_names_of_an_outputs_form(body, meant):
    assert asked(body) == StructuredOutputsParams(**meant)


def test_a_field_that_is_nested_too_deeply_is_refused():
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested too deeply"):
        asked({"stop": deep})


def test_each_allowed_tool_is_looked_up_once():
    """Not compared with all names: a body may have many of both."""

    class Names(list[str]):
        def __contains__(self, name: object) -> bool:
            raise AssertionError("the list is searched")

    tools = [{"type": "function", "function": {"name": name}} for name in "abc"]
    mode = {"mode": "auto", "tools": tools[:2]}
    assert parse_allowed_tools(tools, mode, Names("abc"), True).allowed_names == {"a", "b"}


def test_text_is_no_form():
    assert asked({"response_format": {"type": "text"}, "guided_json": None}) is None
    line = {"prompt": "x", "structured_outputs": {"choice": ["a"]}}
    assert read_line_task(line, {}, 0).params.structured_outputs == StructuredOutputsParams(choice=["a"])


def test_a_responses_format_is_in_its_text():
    own = {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}
    found = parse_response_task({"input": "x", "text": {"format": own, "verbosity": "low"}}, {})
    assert found.params.structured_outputs == StructuredOutputsParams(json=SCHEMA)
    assert parse_response_task({"input": "x", "text": {}}, {}).params.structured_outputs is None
    with pytest.raises(RequestError, match='text="schema"'):
        parse_response_task({"input": "x", "text": {"schema": SCHEMA}}, {})


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"response_format": {"type": "grammar"}}, r'response_format.type="grammar" .*json_schema'),
        ({"response_format": "json"}, r"response_format.type=null"),
        ({"response_format": {"type": "json_schema"}}, "response_format needs a schema"),
        ({"response_format": {"type": "json_schema", "json_schema": 3}}, "response_format needs a schema"),
        ({"response_format": OPENAI, "guided_regex": "a"}, "guided_regex and response_format.*only one"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs=regex and choice"),
        ({"structured_outputs": {}}, "structured_outputs=None .*one of json"),
        ({"structured_outputs": {"rx": "a"}}, "unknown field of structured_outputs 'rx'"),
        ({"structured_outputs": {"structural_tag": "a"}}, "structured_outputs.structural_tag='a' is not sup"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json='{' .*a JSON object"),
        ({"structured_outputs": {"json": "[1]"}}, r"structured_outputs.json='\[1\]' .*a JSON object"),
        ({"structured_outputs": {"choice": ["a", ""]}}, r"structured_outputs.choice=\['a', ''\]"),
        ({"structured_outputs": {"choice": "a"}}, "structured_outputs.choice='a'.*array"),
        ({"guided_regex": 3}, "structured_outputs.regex=3"),
    ],
)
def test_what_is_wrong_is_named(body, named):
    with pytest.raises(RequestError, match=named):
        asked(body)


def test_a_text_is_no_list_of_choices():
    with pytest.raises(TypeError, match="structured_outputs.choice='ab'"):
        StructuredOutputsParams(choice="ab")


def function(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


TOOLS = [function("f"), function("g")]


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_choice_may_allow_some_tools(mode):
    """In a chat and in a response; the chat template gets all tools."""
    some = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [function("g")]}}
    chat = parse_task("chat", None, CHAT | {"tools": TOOLS, "tool_choice": some}, {}, None)
    flat = [{"type": "function", "name": name} for name in ("f", "g")]
    same = {"type": "allowed_tools", "mode": mode, "tools": flat[1:]}
    response = parse_response_task({"input": "x", "tools": flat, "tool_choice": same}, {})
    for box in (chat.toolbox, response.toolbox):
        assert box is not None and [tool.name for tool in box.tools] == ["g"] and len(box.body_tools) == 2
        assert box.is_forced == (mode == "required")


@pytest.mark.parametrize(
    ("allowed", "named"),
    [
        (None, "tool_choice.allowed_tools=null"),
        ({"mode": "none", "tools": [function("f")]}, 'allowed_tools.mode="none"'),
        ({"mode": "auto", "tools": []}, "allowed_tools.tools=a list of 0"),
        ({"mode": "auto", "tools": [function("h")]}, "tool_choice=.*f or g"),
        ({"mode": "auto", "tools": ["f"]}, "tool_choice='f'"),
    ],
)
def test_a_wrong_choice_of_some_tools_is_named(allowed, named):
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    with pytest.raises(RequestError, match=named):
        parse_task("chat", None, CHAT | {"tools": TOOLS, "tool_choice": choice}, {}, None)


def test_a_required_call_overrides_the_text_format():
    """As instructor asks for in the Responses API; other constraints stay refused beside it."""
    flat = {"type": "function", "name": "f", "strict": True, "parameters": SCHEMA}
    own = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}}
    body = {"input": "x", "tools": [flat], "tool_choice": {"type": "function", "name": "f"}, "text": own}
    task = parse_response_task(body | {"include": ["reasoning.encrypted_content"], "store": False}, {})
    assert (
        task.params.structured_outputs is None
        and task.toolbox is not None
        and task.toolbox.forced_name == "f"
    )
    forced = CHAT | {"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}
    with pytest.raises(RequestError, match="tool_choice"):
        parse_task("chat", None, forced, {}, None)


@pytest.mark.parametrize("name", ["extra_args", "vllm_xargs"])
def test_numbers_for_logits_processors_have_two_names(name):
    own = {name: {"ngram_size": 2, "banned": [1, 2]}}
    chat = parse_task("chat", None, CHAT | own, {}, None)
    completion = parse_task("completion", None, {"prompt": "x"} | own, {}, None)
    response = parse_response_task({"input": "x"} | own, {})
    assert all(task.params.extra_args == own[name] for task in (chat, completion, response))
    with pytest.raises(RequestError, match="extra_args"):
        parse_task("chat", None, CHAT | {name: {"a": "b"}}, {}, None)
    both = CHAT | {"extra_args": {"a": 1}, "vllm_xargs": {"a": 2}}
    with pytest.raises(RequestError, match="vllm_xargs"):
        parse_task("chat", None, both, {}, None)

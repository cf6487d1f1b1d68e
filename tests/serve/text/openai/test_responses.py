"""What bodies of the Responses API become."""

from typing import Any

import pytest

from duetto.serve.text.openai.errors import RequestError
from duetto.serve.text.openai.responses import parse_response_task

ITEMS = [
    {"role": "developer", "content": "Be short."},
    {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
    {"type": "message", "role": "user", "content": "d"},
]


def test_input_and_instructions_become_messages():
    task = parse_response_task({"input": ITEMS, "instructions": "Be kind."}, {})
    assert task.messages == [
        {"role": "system", "content": "Be kind."},
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert parse_response_task({"input": "x"}, {}).messages == [{"role": "user", "content": "x"}]


def test_fields_become_parameters():
    body = {"input": "x", "max_output_tokens": 7, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "model": "m"}
    task = parse_response_task(body, {"min_p": 0.1})
    params = task.params
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (7, 0.5, 0.9, 3)
    assert params.min_p == 0.1 and task.model == "m" and task.form == "chat"


NOTHING = {
    "store": True, "metadata": {"a": "b"}, "tools": [], "tool_choice": "auto", "truncation": "disabled",
    "text": {"format": {"type": "text"}}, "include": [], "background": False, "previous_response_id": None,
    "reasoning": {"effort": None}, "parallel_tool_calls": True, "user": "u",
}  # fmt: skip


def test_what_asks_for_nothing_is_accepted():
    assert parse_response_task({"input": "x"} | NOTHING, {}) == parse_response_task({"input": "x"}, {})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id.*nothing is kept"),
        ({"conversation": "c"}, "conversation.*nothing is kept"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"background": True}, "background"),
        ({"text": {"format": {"type": "grammar"}}}, "response_format.type"),
        ({"reasoning": {"summary": "auto"}}, "reasoning"),
        ({"truncation": "auto"}, "truncation"),
        ({"messages": []}, "messages.*input is meant"),
        ({"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"n": 2}, "n=2.*one answer"),
        ({"max_output_tokens": -1}, "max_tokens"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [3]}, r"input\[0\]"),
        ({"input": [{"type": "function_call_output"}]}, r"input\[0\].call_id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, r"input\[0\]=.*arguments"),
        ({"input": [{"type": "computer_call"}]}, r"input\[0\].type"),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, r"input\[0\].encrypted_content"),
        ({"input": [{"type": "reasoning", "content": [{"type": "x"}]}]}, r"input\[0\].content\[0\]"),
        ({"input": [{"type": "reasoning", "summary": [{"type": "x"}]}]}, r"input\[0\].summary\[0\]"),
        ({"input": [{"type": "reasoning", "summary": "x", "content": []}]}, r"input\[0\].summary=.x"),
        ({"input": [{"role": "tool", "content": ""}]}, r"input\[0\].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"content\[0\]"),
        ({"instructions": 3}, "instructions"),
        ({"max_tool_calls": 3}, "max_tool_calls"),
        ({"top_logprobs": 3}, "top_logprobs"),
    ],
)
def test_what_is_not_there_is_refused_by_name(fields, named):
    with pytest.raises(RequestError, match=named):
        parse_response_task({"input": "x"} | fields, {})


def reasoning(text: str, **fields: Any) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}], **fields}


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}


def test_items_of_a_reply_are_one_message():
    said = {"type": None, "role": "assistant", "content": "x"}
    output = {"type": "function_call_output", "call_id": "f", "output": "y"}
    items = [
        reasoning("a"), said, call("f"), call("g"), output, reasoning("b"), call("h"), reasoning("c"),
        reasoning("", summary=[{"type": "summary_text", "text": "d"}], content=None), said, said,
    ]  # fmt: skip
    fields = [
        {name: message.get(name) for name in ("reasoning", "content") if name in message}
        | ({"calls": [one["id"] for one in message["tool_calls"]]} if "tool_calls" in message else {})
        for message in parse_response_task({"input": items}, {}).messages or []
    ]
    assert fields == [
        {"reasoning": "a", "content": "x", "calls": ["f", "g"]},
        {"content": "y"},
        {"reasoning": "b", "calls": ["h"]},
        {"reasoning": "c"},
        {"reasoning": "d", "content": "x"},
        {"content": "x"},
    ]

"""Calls of tools in chats and responses, whole and as events that OpenAI's own types accept."""

import json
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from duetto.serve.engine.startup.model_folder import DEMO_FOLDER
from duetto.serve.jobs.batch.answers import AnswerFormatter
from duetto.serve.server.streams import completion_stream
from duetto.serve.server.streams import responses_stream as responses
from duetto.serve.text.openai.completion_request import parse_completion, parse_response
from duetto.serve.text.openai.errors import RequestError
from duetto.serve.text.openai.replies import Replies
from duetto.serve.text.openai.tasks import parse_task, task_sampling_params
from duetto.serve.text.outputs import CompletionOutput, RequestOutput
from duetto.serve.text.tokenizer.tokenizer import Tokenizer

TEMPLATE = "{{ messages[-1].content }}{% if '</think>' in messages[0].content %}<tool_call>{% endif %}"
CALL = '<tool_call>\n{"name": "rain", "arguments": {"days": 3}}\n</tool_call>'
TEXT = f"<think>hm</think>\n\nLook.\n{CALL}\n{CALL}"
FUNCTION = {"name": "rain", "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
ASKED = {"messages": [{"role": "user", "content": "rain?"}], "tools": TOOLS}
INPUT: dict[str, Any] = {"input": "rain?", "tools": [{"type": "function", **FUNCTION}]}


@pytest.fixture(scope="module")
def replies() -> Replies:
    tokenizer = Tokenizer.from_folder(DEMO_FOLDER)
    assert tokenizer is not None
    tokenizer.chat_template = TEMPLATE
    return Replies("demo", tokenizer)


def outputs(text: str, size: int, reason: str = "stop") -> list[CompletionOutput]:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    ends = [*[None] * (len(pieces) - 1), reason]
    return [CompletionOutput(0, piece, [7], finish_reason=e) for piece, e in zip(pieces, ends, strict=True)]


def result(text: str, reason: str = "stop") -> RequestOutput:
    return RequestOutput("0", None, [5], [CompletionOutput(0, text, [7] * 9, finish_reason=reason)])


def records(written: bytes) -> list[dict[str, Any]]:
    lines = [line for line in written.decode().splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def streamed(events: Any, found: list[CompletionOutput]) -> list[dict[str, Any]]:
    return records(
        events.encode_start()
        + b"".join(events.encode_chunks([one]) for one in found)
        + events.encode_end(3, 1)
    )


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize(("reason", "end"), [("stop", "tool_calls"), ("length", "length")])
def test_a_chat_streams_the_calls_that_the_whole_has(replies, size, reason, end):
    asked = parse_completion("chat", ASKED, {})
    whole = completion_stream.build_completion(replies, "1", asked, [result(TEXT, reason)])
    (choice,) = ChatCompletion.model_validate(whole | {"choices": whole["choices"]}).choices
    message: Any = choice.message
    assert (message.content, message.reasoning, choice.finish_reason) == ("\n\nLook.", "hm", end)
    assert [one.function.name for one in message.tool_calls] == ["rain"] * 2
    assert [one.function.arguments for one in message.tool_calls] == ['{"days": 3}'] * 2
    calls: list[dict[str, Any]] = []
    content, last = "", None
    for record in streamed(
        completion_stream.CompletionEvents(replies, "1", asked), outputs(TEXT, size, reason)
    ):
        chunk: Any = ChatCompletionChunk.model_validate(record)
        last = chunk.choices[0].finish_reason
        content += chunk.choices[0].delta.content or ""
        for one in chunk.choices[0].delta.tool_calls or []:
            if one.index == len(calls):
                calls.append({"id": one.id, "type": one.type, "function": {"name": one.function.name}})
                calls[-1]["function"]["arguments"] = ""
            else:
                assert one.id is None and one.function.name is None
            calls[one.index]["function"]["arguments"] += one.function.arguments
    assert last == end and content == message.content
    assert calls == whole["choices"][0]["message"]["tool_calls"]
    assert len({one["id"] for one in calls}) == 2 and calls[0]["id"].startswith("call_")


def test_nothing_but_calls_has_no_content(replies):
    asked = parse_completion("chat", ASKED, {})
    message = completion_stream.build_completion(replies, "1", asked, [result(CALL)])["choices"][0]["message"]
    assert message["content"] is None and len(message["tool_calls"]) == 1
    again = completion_stream.build_completion(replies, "1", asked, [result(CALL)])["choices"][0]["message"]
    other = completion_stream.build_completion(replies, "2", asked, [result(CALL)])["choices"][0]["message"]
    assert again == message and other["tool_calls"][0]["id"] != message["tool_calls"][0]["id"]


@pytest.mark.parametrize("fields", [{"tool_choice": "none"}, {"tools": []}])
def test_where_nothing_may_be_called_marks_are_text(replies, fields):
    asked = parse_completion("chat", ASKED | fields, {})
    choice = completion_stream.build_completion(replies, "1", asked, [result(CALL)])["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": CALL} and choice["finish_reason"] == "stop"


def test_resumed_streams_repeat_no_events(replies):
    asked, found = parse_completion("chat", ASKED, {}), outputs(TEXT, 5)
    events, other = (
        completion_stream.CompletionEvents(replies, "1", asked),
        completion_stream.CompletionEvents(replies, "1", asked),
    )
    told = [events.encode_chunks([one]) for one in found]
    other.skip_outputs(found[:13], 0)
    assert [other.encode_chunks([one]) for one in found[13:]] == told[13:]


def test_an_answer_of_a_batch_has_its_calls(replies):
    task = parse_task("chat", "a", ASKED, {}, 0)
    written = [
        AnswerFormatter("salt", "demo", replies.tokenizer).format_result(3, task, result(CALL))
        for _ in range(2)
    ]
    (choice,) = json.loads(written[0])["response"]["body"]["choices"]
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "rain", "arguments": '{"days": 3}'}
    assert choice["finish_reason"] == "tool_calls" and written[0] == written[1]


@pytest.mark.parametrize("size", [1, 1000])
def test_a_response_has_an_item_for_each_call(replies, size):
    asked = parse_response(INPUT, {})
    whole = responses.build_response(replies, "1", asked, [result(TEXT)])
    response: Any = Response.model_validate(whole)
    assert [item.type for item in response.output] == ["reasoning", "message", *["function_call"] * 2]
    assert [item.arguments for item in response.output[2:]] == ['{"days": 3}'] * 2
    assert len({item.id for item in response.output}) == len({i.call_id for i in response.output[2:]}) + 2
    events = streamed(responses.ResponseEvents(replies, "1", asked, [5]), outputs(TEXT, size))
    known: Any = TypeAdapter(ResponseStreamEvent)
    parsed = [known.validate_python(event) for event in events]
    kinds = [event.type.removeprefix("response.") for event in parsed if "delta" not in event.type]
    assert kinds[-7:] == [
        "output_item.added", "function_call_arguments.done", "output_item.done", "output_item.added",
        "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    told = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(told) == '{"days": 3}' * 2 and events[-1]["response"]["output"] == whole["output"]


def test_calls_and_their_outputs_are_messages_again():
    call = {"type": "function_call", "call_id": "c", "name": "rain", "arguments": '{"days": 3}'}
    given = [
        {"role": "user", "content": "rain?"}, {"role": "assistant", "content": "Look."}, call,
        call | {"call_id": "d"}, {"type": "function_call_output", "call_id": "c", "output": "wet"},
    ]  # fmt: skip
    (task,) = parse_response({"input": given, "tools": INPUT["tools"]}, {}).tasks
    assert task.messages is not None and task.toolbox is not None and task.toolbox.body_tools == TOOLS
    _, said, output = task.messages
    assert said["content"] == "Look." and [one["id"] for one in said["tool_calls"]] == ["c", "d"]
    assert said["tool_calls"][0]["function"] == {"name": "rain", "arguments": {"days": 3}}
    assert output == {"role": "tool", "tool_call_id": "c", "content": "wet"}


NAMED = {"type": "function", "function": {"name": "snow"}}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{}]}, r"tools\[0\].type=null"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function must be an object"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, r"tools\[0\].function.name"),
        ({"tools": TOOLS * 2}, "tools=.rain.*name of its own"),
        ({"tools": {"a": 1}}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 3}}]}, "parameters=3"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "parameters.type",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": 3}}]}, "strict=3"),
        ({"tool_choice": NAMED}, "tool_choice=.*snow.*rain"),
        ({"tool_choice": "any"}, 'tool_choice="any"'),
        ({"tools": None, "tool_choice": "required"}, "tool_choice.*without tools"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls=1"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice.*beside"),
        ({"functions": [FUNCTION]}, "functions"),
    ],
)
def test_what_is_wrong_with_tools_is_told_by_name(fields, named):
    with pytest.raises(RequestError, match=named):
        parse_task("chat", None, ASKED | fields, {}, None)


def test_models_with_unknown_formats_call_no_tools():
    plain = Replies("demo", Tokenizer.from_folder(DEMO_FOLDER))
    for choice in ("auto", "required"):
        task = parse_task("chat", None, ASKED | {"tool_choice": choice}, {}, None)
        with pytest.raises(RequestError, match="tools is not allowed: .*--tool-call-parser"):
            task_sampling_params(task, plain.dialect, [5])
        named = Replies("demo", plain.tokenizer, "hermes").dialect
        shape = task_sampling_params(task, named, [5]).structured_outputs
        assert (shape is not None) is (choice == "required")
    task = parse_task("chat", None, ASKED | {"tool_choice": "none"}, {}, None)
    assert task_sampling_params(task, plain.dialect, [5]) is task.params

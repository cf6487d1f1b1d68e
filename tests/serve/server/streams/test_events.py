"""Chats and responses of a model that reasons, whole and as events that OpenAI's own types accept."""

from typing import Any

import msgspec
import pytest
from openai.types.chat import ChatCompletion
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from duetto.serve.engine.startup.model_folder import DEMO_FOLDER
from duetto.serve.server.streams import completion_stream
from duetto.serve.server.streams import responses_stream as responses
from duetto.serve.text.openai.completion_request import parse_completion, parse_response
from duetto.serve.text.openai.errors import RequestError
from duetto.serve.text.openai.replies import Replies
from duetto.serve.text.outputs import CompletionOutput, RequestOutput
from duetto.serve.text.tokenizer.tokenizer import Tokenizer

TEMPLATE = "{{ messages[-1].content }}{% if '</think>' in messages[0].content %}{% endif %}"
PIECES = ["<th", "ink>may", "be</thi", "nk>", "y", "es"]
ASKED = {"messages": [{"role": "user", "content": "Is it?"}], "max_tokens": 6}
INPUT = {"input": "Is it?", "max_output_tokens": 6}


@pytest.fixture(scope="module")
def replies() -> Replies:
    tokenizer = Tokenizer.from_folder(DEMO_FOLDER)
    assert tokenizer is not None
    tokenizer.chat_template = TEMPLATE
    return Replies("demo", tokenizer)


def pieces(texts: list[str], reason: str = "stop") -> list[CompletionOutput]:
    ends = [*[None] * (len(texts) - 1), reason]
    return [CompletionOutput(0, text, [7], finish_reason=end) for text, end in zip(texts, ends, strict=True)]


def result(texts: list[str], prompt_ids: list[int], reason: str = "stop") -> RequestOutput:
    ids = [7] * len(texts)
    return RequestOutput(
        "0", None, prompt_ids, [CompletionOutput(0, "".join(texts), ids, finish_reason=reason)]
    )


def records(written: bytes) -> list[dict[str, Any]]:
    lines = [line for line in written.decode().splitlines() if line.startswith("data: {")]
    return [msgspec.json.decode(line.removeprefix("data: ")) for line in lines]


def streamed(events: Any, outputs: list[CompletionOutput]) -> list[dict[str, Any]]:
    written = events.encode_start() + b"".join(events.encode_chunks([one]) for one in outputs)
    return records(written + events.encode_end(3, 1))


def test_a_chat_has_its_reasoning_beside_its_answer(replies):
    asked = parse_completion("chat", ASKED, {})
    reply = completion_stream.build_completion(replies, "1", asked, [result(PIECES, [5])])
    ChatCompletion.model_validate(reply)
    message = reply["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"], message["content"]) == (
        "maybe",
        "maybe",
        "yes",
    )
    deltas = [
        c["delta"]
        for r in streamed(completion_stream.CompletionEvents(replies, "1", asked), pieces(PIECES))
        for c in r["choices"]
    ]
    for name, text in (("reasoning", "maybe"), ("reasoning_content", "maybe"), ("content", "yes")):
        assert "".join(delta.get(name, "") for delta in deltas) == text


def test_reasoning_that_nobody_wants_is_left_out(replies):
    asked = parse_completion("chat", ASKED | {"include_reasoning": False}, {})
    message = completion_stream.build_completion(replies, "1", asked, [result(PIECES, [5])])["choices"][0][
        "message"
    ]
    assert message == {"role": "assistant", "content": "yes"}


def test_a_template_may_begin_the_reasoning(replies):
    begun = replies.tokenizer.encode("Is it?<think>\n")
    asked = parse_completion("chat", ASKED, {})
    message = completion_stream.build_completion(replies, "1", asked, [result(["maybe</think>yes"], begun)])[
        "choices"
    ][0]["message"]
    assert (message["reasoning"], message["content"]) == ("maybe", "yes")


def test_text_of_models_without_reasoning_is_unchanged():
    plain = Replies("demo", Tokenizer.from_folder(DEMO_FOLDER))
    message = completion_stream.build_completion(
        plain, "1", parse_completion("chat", ASKED, {}), [result(PIECES, [5])]
    )["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "".join(PIECES)}


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_a_response_is_an_item_of_reasoning_and_a_message(replies, reason, status):
    asked = parse_response(INPUT, {})
    whole = responses.build_response(replies, "1", asked, [result(PIECES, [5, 6, 7], reason)])
    response: Any = Response.model_validate(whole)
    assert response.output_text == "yes" and response.status == status
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "maybe"
    assert whole["usage"]["output_tokens"] == 6 and whole["usage"]["total_tokens"] == 9
    events = streamed(responses.ResponseEvents(replies, "1", asked, [5, 6, 7]), pieces(PIECES, reason))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    known: Any = TypeAdapter(ResponseStreamEvent)
    parsed = [known.validate_python(event) for event in events]
    assert [e.type for e in parsed if "delta" not in e.type] == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.reasoning_text.done", "response.output_item.done", "response.output_item.added",
        "response.content_part.added", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", f"response.{status}",
    ]  # fmt: skip
    texts = [
        "".join(e["delta"] for e in events if e["type"] == f"response.{kind}.delta")
        for kind in ("reasoning_text", "output_text")
    ]
    assert texts == ["maybe", "yes"]
    last = events[-1]["response"]
    assert last | {"created_at": 0, "usage": None} == whole | {"created_at": 0, "usage": None}


def test_an_answer_without_text_is_an_empty_message(replies):
    asked = parse_response(INPUT, {})
    events = streamed(responses.ResponseEvents(replies, "1", asked, []), pieces([""]))
    assert [item["content"] for item in events[-1]["response"]["output"]] == [
        [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}]
    ]


@pytest.mark.parametrize(
    ("texts", "statuses"),
    [
        (["<think>may"], {"reasoning": "incomplete"}),
        (["<think>maybe</think>", "ye"], {"reasoning": "completed", "message": "incomplete"}),
        (["<think>maybe</think>"], {"reasoning": "completed", "message": "incomplete"}),
        (["ye"], {"message": "incomplete"}),
        ([""], {"message": "incomplete"}),
    ],
)
@pytest.mark.parametrize("reason", ["length", "abort"])
def test_the_last_item_of_a_cut_response_is_incomplete(replies, texts, statuses, reason):
    asked = parse_response(INPUT, {})
    whole = responses.build_response(replies, "1", asked, [result(texts, [5], reason)])
    Response.model_validate(whole)
    assert whole["status"] == "incomplete"
    assert {item["type"]: item["status"] for item in whole["output"]} == statuses
    events = streamed(responses.ResponseEvents(replies, "1", asked, [5]), pieces(texts, reason))
    assert events[-1]["type"] == "response.incomplete" and events[-1]["response"]["output"] == whole["output"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == whole["output"]


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({str(i): "x" for i in range(17)}, "metadata=an object of 17 is not allowed.*at most 16 pairs"),
        ({"k" * 65: "x"}, "metadata.k*.=.* is not allowed.*keys of at most 64 characters"),
        ({"k": "x" * 513}, r"metadata\[k\]=.* is not allowed.*values of at most 512"),
        ({"k": 1}, r"metadata\[k\]=1 is not allowed"),
    ],
)
def test_metadata_that_each_event_repeats_are_short(metadata, named):
    with pytest.raises(RequestError, match=named):
        parse_response(INPUT | {"metadata": metadata}, {})
    most = {"k" * 64: "x" * 512} | {str(i): "x" for i in range(15)}
    assert parse_response(INPUT | {"metadata": most}, {}).repeated_fields == {"metadata": most}

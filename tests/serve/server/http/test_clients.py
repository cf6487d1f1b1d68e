"""What OpenAI's own client gets from a server is what the library gives."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import jsonschema
import openai
import pytest
from cases.requests import SIZES, SMALLEST
from suite.marks import full

from duetto import LLM, PoolingParams, SamplingParams

OPTIONS = {
    "model": SMALLEST, "dtype": "float32", "max_prefill_delay": 0.0, "background_compilation": False,
    **SIZES,
}  # fmt: skip
TEXTS = ["def add(a, b):", "import os\n", "class Stack:", "for i in range("]
ASKED: list[dict[str, Any]] = [
    {"temperature": 0.0, "max_tokens": 24},
    {"temperature": 0.9, "seed": 7, "max_tokens": 24, "n": 2},
    {"temperature": 0.8, "seed": 3, "max_tokens": 30, "stop": ["\n"], "frequency_penalty": 0.5},
]


@pytest.fixture(scope="module")
def llm():
    """As the server's engine, whose programs it finds on disk; another process computes with them."""
    with LLM(**OPTIONS) as own:
        yield own


@pytest.fixture(scope="module")
def client(server):
    with server.openai() as own:
        yield own


def offline(llm: LLM, text: str, asked: dict[str, Any]) -> list[tuple[str, str | None]]:
    """Beside what the model's authors recommend, as the server has it."""
    (out,) = llm.generate(text, replace(llm.get_default_sampling_params(), **asked), use_tqdm=False)
    return [(one.text, one.finish_reason) for one in out.outputs]


def joined(chunks: Any) -> list[tuple[str, str | None]]:
    """Texts and ends of a stream's choices."""
    texts: dict[int, str] = {}
    ends: dict[int, str | None] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            new = choice.text if hasattr(choice, "text") else choice.delta.content
            texts[choice.index] = texts.get(choice.index, "") + (new or "")
            ends[choice.index] = choice.finish_reason or ends.get(choice.index)
    return [(texts[i], ends[i]) for i in sorted(texts)]


@pytest.mark.parametrize("asked", [*ASKED[:2], full(ASKED[2])])
def test_streamed_and_whole_are_what_the_library_gives(client, llm, asked):
    for text in TEXTS:
        expected = offline(llm, text, asked)
        whole = client.completions.create(model="demo", prompt=text, **asked)
        assert [(one.text, one.finish_reason) for one in whole.choices] == expected
        assert joined(client.completions.create(model="demo", prompt=text, stream=True, **asked)) == expected


def test_chats_are_what_the_library_gives(client, llm):
    messages: Any = [{"role": "user", "content": "sort a list"}]
    (out,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)
    asked: Any = {"model": "other", "messages": messages, "temperature": 0.0, "max_completion_tokens": 20}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == out.outputs[0].text and whole.model == "other"
    assert whole.usage.prompt_tokens == len(out.prompt_token_ids) and whole.usage.completion_tokens == 20
    chunks = list(
        client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **asked)
    )
    assert joined(chunks) == [(out.outputs[0].text, "length")]
    assert chunks[0].choices[0].delta.role == "assistant"
    usage = chunks[-1].usage
    assert not chunks[-1].choices and (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (
        len(out.prompt_token_ids), 20, len(out.prompt_token_ids) + 20,
    )  # fmt: skip


def test_log_probabilities_are_the_same_in_a_stream(client):
    asked: Any = {"model": "demo", "temperature": 0.0, "max_tokens": 8}
    messages: Any = [{"role": "user", "content": "def"}]
    chat = {"messages": messages, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**asked, **chat).choices[0].logprobs.content
    chunks = client.chat.completions.create(stream=True, **asked, **chat)
    pieces = [x for chunk in chunks for one in chunk.choices if one.logprobs for x in one.logprobs.content]
    assert pieces == whole and len(whole) == 8 and all(len(one.top_logprobs) == 2 for one in whole)
    text = client.completions.create(prompt="def", logprobs=2, **asked).choices[0].logprobs
    parts = client.completions.create(prompt="def", logprobs=2, stream=True, **asked)
    parts = [one.logprobs for chunk in parts for one in chunk.choices if one.logprobs]
    assert [x for part in parts for x in part.token_logprobs] == text.token_logprobs
    assert [x for part in parts for x in part.top_logprobs] == text.top_logprobs
    assert [x for part in parts for x in part.text_offset] == text.text_offset


def test_several_prompts_have_choices_in_their_order(client, llm):
    expected = [one for text in TEXTS for one in offline(llm, text, ASKED[1])]
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    for prompts in (TEXTS, ids):
        whole = client.completions.create(model="demo", prompt=prompts, **ASKED[1])
        assert [(one.text, one.finish_reason) for one in whole.choices] == expected
        assert [one.index for one in whole.choices] == list(range(8))
        chunks = client.completions.create(model="demo", prompt=prompts, stream=True, **ASKED[1])
        assert joined(chunks) == expected
    assert whole.usage.prompt_tokens == sum(map(len, ids)) and whole.usage.completion_tokens > 0


@pytest.mark.parametrize("most", [0, 1])
def test_echoed_prompts_have_scores(client, llm, most):
    """As evaluations ask for them: token ids, and what each is worth."""
    ids = llm.tokenizer.encode("def add(a, b):")
    asked: Any = {
        "model": "demo",
        "prompt": [ids],
        "echo": True,
        "logprobs": 1,
        "max_tokens": most,
        "temperature": 0.0,
    }
    choice = client.completions.create(**asked).choices[0]
    (out,) = llm.generate(
        {"prompt_token_ids": ids}, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1)
    )
    expected = [at[i].logprob for at, i in zip(out.prompt_logprobs[1:], ids[1:], strict=True)]
    found = choice.logprobs.token_logprobs
    assert found[0] is None and found[1 : len(ids)] == pytest.approx(expected)
    assert len(found) == len(ids) + most == len(choice.logprobs.tokens) == len(choice.logprobs.top_logprobs)
    assert choice.text == "def add(a, b):" + (out.outputs[0].text if most else "")
    streamed = client.completions.create(
        model="demo", prompt="import", echo=True, stream=True, max_tokens=4, temperature=0.0
    )
    ((text, _),) = joined(streamed)
    assert text == "import" + offline(llm, "import", {"temperature": 0.0, "max_tokens": 4})[0][0]


@pytest.mark.full
def test_many_streams_at_once_are_what_each_is_alone(server, llm):
    asked: Any = {"temperature": 0.9, "max_tokens": 20}

    async def stream(client: openai.AsyncOpenAI, i: int) -> list[tuple[str, str | None]]:
        chunks = await client.completions.create(
            model="demo", prompt=TEXTS[i % 4], seed=i, stream=True, **asked
        )
        return joined([chunk async for chunk in chunks])

    async def every() -> list[Any]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="second-key", timeout=600
        ) as client:
            return await asyncio.gather(*(stream(client, i) for i in range(24)))

    found = asyncio.run(every())
    assert found == [offline(llm, TEXTS[i % 4], asked | {"seed": i}) for i in range(24)]


def test_models_are_listed(client):
    assert [one.id for one in client.models.list()] == ["demo", "other"]
    assert client.models.retrieve("other").id == "other"
    with pytest.raises(openai.NotFoundError, match="'third' is not served here"):
        client.models.retrieve("third")
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="third", prompt="x")


def test_responses_are_chats(client, llm):
    messages: Any = [{"role": "system", "content": "Python"}, {"role": "user", "content": "sort a list"}]
    (out,) = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)
    asked: Any = {
        "model": "demo", "instructions": "Python", "input": "sort a list", "temperature": 0.0,
        "max_output_tokens": 20,
    }  # fmt: skip
    whole = client.responses.create(**asked)
    assert whole.output_text == out.outputs[0].text and whole.status == "incomplete"
    assert whole.usage.output_tokens == 20 and whole.incomplete_details.reason == "max_output_tokens"
    with client.responses.stream(**asked) as events:
        found: Any = list(events)
    assert found[0].type == "response.created" and found[-1].type == "response.incomplete"
    assert found[-1].response.output_text == whole.output_text
    again = [{"role": "user", "content": "x"}, *whole.output, {"role": "user", "content": "y"}]
    assert client.responses.create(**(asked | {"input": again})).output_text
    with pytest.raises(openai.BadRequestError, match="previous_response_id.*nothing is kept"):
        client.responses.create(previous_response_id=whole.id, **asked)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="no response is kept"):
            call(whole.id)


def test_embeddings_are_what_the_library_gives(client, llm):
    """The client asks for base64; floats are the same numbers."""
    expected = [out.outputs.embedding for out in llm.embed(TEXTS, use_tqdm=False)]
    found = client.embeddings.create(model="demo", input=TEXTS)
    assert [one.embedding for one in found.data] == expected and [one.index for one in found.data] == [
        0,
        1,
        2,
        3,
    ]
    ids = [llm.tokenizer.encode(text) for text in TEXTS]
    plain = client.embeddings.create(model="demo", input=ids, encoding_format="float")
    assert [one.embedding for one in plain.data] == expected
    assert plain.usage.prompt_tokens == plain.usage.total_tokens == sum(map(len, ids))
    (mean,) = llm.embed("import", pooling_params=PoolingParams(8, pooling="mean"), use_tqdm=False)
    asked = client.embeddings.create(
        model="demo", input="import", dimensions=8, extra_body={"pooling": "mean"}, encoding_format="float"
    )
    assert asked.data[0].embedding == mean.outputs.embedding and len(mean.outputs.embedding) == 8


def test_more_inputs_than_may_wait_are_embedded(client):
    texts = [f"x = {i}" for i in range(300)]
    many = client.embeddings.create(model="demo", input=texts)
    assert [one.index for one in many.data] == list(range(300))
    assert (
        many.data[299].embedding == client.embeddings.create(model="demo", input=texts[299]).data[0].embedding
    )
    with pytest.raises(openai.BadRequestError, match="dimensions 9999 is not allowed: at most 64"):
        client.embeddings.create(model="demo", input="x", dimensions=9999)
    with pytest.raises(openai.BadRequestError, match="empty"):
        client.embeddings.create(model="demo", input=["x", ""])


def test_structured_outputs_are_what_the_library_gives(client, llm):
    """Drawn at random: what is finished is as asked."""
    own = {"enum": [["a", 1], {"b": None}, "c"]}
    asked: dict[str, Any] = {"temperature": 1.5, "seed": 5, "max_tokens": 40, "n": 3}
    expected = offline(llm, TEXTS[0], asked | {"structured_outputs": {"json": own}})
    assert {end for _, end in expected} == {"stop"} and all(json.loads(x) in own["enum"] for x, _ in expected)
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": own}}
    for extra in ({"structured_outputs": {"json": own}}, {"response_format": form}):
        chunks = client.completions.create(
            model="demo", prompt=TEXTS[0], stream=True, extra_body=extra, **asked
        )
        assert joined(chunks) == expected
    chat: Any = {"model": "demo", "messages": [{"role": "user", "content": "sort"}], "response_format": form}
    for choice in client.chat.completions.create(**chat, **asked).choices:
        assert choice.finish_reason == "stop" and json.loads(choice.message.content) in own["enum"]
    form["json_schema"]["schema"] = {"type": "odd"}
    with pytest.raises(openai.BadRequestError, match="Invalid type: odd") as error:
        client.chat.completions.create(**chat)
    assert error.value.param == "structured_outputs"


RAIN = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Malmö", "Oslo"]},
        "days": {"type": "integer", "maximum": 9, "minimum": 0},
    },
    "required": ["city"],
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "rain", "parameters": RAIN}},
    {"type": "function", "function": {"name": "now"}},
]
SCHEMAS = {"rain": RAIN, "now": {"maxProperties": 0}}
ONE: Any = {"type": "function", "function": {"name": "now"}}


def called(chunks: Any) -> tuple[list[tuple[str, str, str]], str, str | None]:
    """The calls of a stream, its text, and its end."""
    calls: list[list[str]] = []
    text, end = "", None
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        text, end = text + (choice.delta.content or ""), choice.finish_reason or end
        for one in choice.delta.tool_calls or []:
            if one.id:
                assert one.index == len(calls) and one.type == "function"
                calls.append([one.id, one.function.name, ""])
            calls[one.index][2] += one.function.arguments
    return [(id, name, arguments) for id, name, arguments in calls], text, end


@pytest.mark.parametrize(("choice", "seed"), [("required", 1), ("required", 2), ("required", 3), (ONE, 4)])
def test_calls_that_must_come_are_calls_of_the_tools(client, choice, seed):
    """In a stream too, for any seed, and the conversation goes on with their results."""
    asked: Any = {
        "model": "demo", "messages": [{"role": "user", "content": "rain?"}], "tools": TOOLS,
        "tool_choice": choice, "temperature": 1.5, "seed": seed, "max_tokens": 120,
        "parallel_tool_calls": seed % 2 == 1,
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0]
    calls, text, end = called(client.chat.completions.create(stream=True, **asked))
    found = [(one.function.name, one.function.arguments) for one in whole.message.tool_calls]
    assert [one[1:] for one in calls] == found and end == whole.finish_reason
    if end == "tool_calls":
        assert whole.message.content is None and text == ""
        for name, arguments in found:
            assert choice == "required" or name == "now"
            jsonschema.validate(json.loads(arguments), SCHEMAS[name])
    assert len(found) == 1 or seed % 2 == 1
    results = [{"role": "tool", "tool_call_id": one.id, "content": "3"} for one in whole.message.tool_calls]
    asked["messages"] = [*asked["messages"], whole.message, *results]
    if end == "tool_calls":
        again = client.chat.completions.create(**asked | {"tool_choice": "none"}).choices[0]
        assert again.message.tool_calls is None and again.message.content


def test_calls_that_may_come_leave_a_text_as_it_is(client):
    asked: Any = {
        "model": "demo",
        "messages": [{"role": "user", "content": "x"}],
        "temperature": 0,
        "max_tokens": 8,
    }
    plain = client.chat.completions.create(**asked).choices[0]
    assert client.chat.completions.create(**asked, tools=TOOLS).choices[0] == plain
    with pytest.raises(openai.BadRequestError, match="tool_choice.*none or auto without tools"):
        client.chat.completions.create(**asked, tool_choice="required")


def test_responses_call_functions(client):
    tools: Any = [{"type": "function", "name": "now"}]
    asked: Any = {
        "model": "demo",
        "input": "x",
        "tools": tools,
        "tool_choice": {"type": "function", "name": "now"},
    }
    (call,) = client.responses.create(**asked, temperature=0).output
    assert (call.type, call.name, call.arguments, call.status) == ("function_call", "now", "{}", "completed")
    with client.responses.stream(**asked, temperature=0) as events:
        kinds = [event.type for event in events]
    assert "response.function_call_arguments.done" in kinds and kinds[-1] == "response.completed"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
    again = [{"role": "user", "content": "x"}, call, result]
    assert client.responses.create(model="demo", input=again, max_output_tokens=4).output_text

"""Replies that come back as history: chats and responses make the same prompt of them, which is that of the
well-formed conversation."""

from typing import Any

import pytest
from cases.text.dialects import ASKED, CALL, CALLED, FAMILIES, TOKENS, TOOL, template
from cases.text.letters import letters
from openai.types.chat import ChatCompletion
from openai.types.responses import Response

from duetto.serve.server.streams import completion_stream, responses_stream
from duetto.serve.text.openai.completion_request import parse_completion, parse_response
from duetto.serve.text.openai.replies import Replies
from duetto.serve.text.openai.tasks import tokenize_prompt
from duetto.serve.text.outputs import CompletionOutput, RequestOutput
from duetto.serve.text.tokenizer.chats.chat import render_chat
from duetto.serve.text.tools.formats import TOOL_FORMATS

FLAT = {"type": "function"} | TOOL["function"]
CITY = {"name": "rain", "arguments": {"city": "Malmö", "days": [1, 2]}}
SAID = CALLED | {"tool_calls": [CALL | {"function": CITY}]}
CALLING = [name for name, family in FAMILIES.items() if family.calls in TOOL_FORMATS]
WAYS = ("object", "dump", "without nulls")


def written(source: str, prompt: str, message: dict[str, Any], ends: str) -> str:
    """What the template writes for a message of the assistant, behind the prompt."""
    options: Any = {**TOKENS, "tools": [TOOL], "enable_thinking": True, "thinking": True}
    whole = render_chat(source, [ASKED, message], add_generation_prompt=False, **options)
    return whole.removeprefix(prompt).removesuffix(ends)


def sent(record: dict[str, Any], parsed: Any, way: str) -> Any:
    return record if way == "object" else parsed.model_dump(exclude_none=way == "without nulls")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", CALLING)
def test_a_loop_of_tools_is_the_same_prompt_in_both(family, way):
    source, variables = template(family), {"enable_thinking": True, "thinking": True}
    tokenizer = letters(source)
    replies = Replies("demo", tokenizer)
    prompt = render_chat(source, [ASKED], **TOKENS, **variables, tools=[TOOL])
    text = written(source, prompt, SAID, FAMILIES[family].ends)
    ids = tokenizer.encode(prompt)
    output = RequestOutput("0", None, ids, [CompletionOutput(0, text, [7], finish_reason="stop")])

    chat = {"messages": [ASKED], "tools": [TOOL], "chat_template_kwargs": variables}
    reply = completion_stream.build_completion(replies, "1", parse_completion("chat", chat, {}), [output])
    message = sent(
        reply["choices"][0]["message"], ChatCompletion.model_validate(reply).choices[0].message, way
    )
    id = message["tool_calls"][0]["id"]
    chat["messages"] = [ASKED, message, {"role": "tool", "tool_call_id": id, "content": "wet"}]
    (task,) = parse_completion("chat", chat, {}).tasks

    asked = {"input": [ASKED], "tools": [FLAT], "chat_template_kwargs": variables}
    whole = responses_stream.build_response(replies, "1", parse_response(asked, {}), [output])
    items = zip(whole["output"], Response.model_validate(whole).output, strict=True)
    result = {"type": "function_call_output", "call_id": id, "output": "wet"}
    asked["input"] = [ASKED, *(sent(*item, way) for item in items), result]
    (other,) = parse_response(asked, {}).tasks

    said = {name: message[name] for name in ("content", "reasoning") if message.get(name)}
    said = CALLED | {"reasoning": None, **said, "tool_calls": [CALL | {"id": id, "function": CITY}]}
    options = {**dict.fromkeys(TOKENS), **variables, "tools": [TOOL]}
    expected = tokenizer.encode(render_chat(source, [ASKED, said, chat["messages"][2]], **options))
    assert tokenize_prompt(task, tokenizer, 10_000) == expected == tokenize_prompt(other, tokenizer, 10_000)

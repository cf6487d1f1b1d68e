"""Bodies of OpenAI's Responses API, without state between requests, and replies to them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ....neutral_values import NEUTRAL
from ....refusals import is_among
from ..outputs import CompletionOutput
from ..tools.stream_reader import ToolCallStart
from .errors import RequestError, require_field
from .fields import reasoning_to_chat_fields, text_to_chat_fields, tools_to_chat_fields
from .tasks import Task, parse_task

# Types of parts that have text.
TEXT_PART_TYPES = ("input_text", "output_text", "reasoning_text", "summary_text", "text")
# Fields of a message of the assistant, in the order of its items.
ASSISTANT_FIELDS = ("reasoning", "content", "tool_calls")
# `incomplete_details` by finish reason.
INCOMPLETE_DETAILS = {"length": {"reason": "max_output_tokens"}, "abort": None}
STATEFUL_FIELDS = {
    "previous_response_id": "nothing is kept between requests: send the whole conversation as input",
    "conversation": "nothing is kept between requests: send the whole conversation as input",
    "prompt": "no prompts are kept here: send instructions and input",
}
CHAT_ONLY_FIELDS = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
CHAT_FIELD_BY_NAME = {"max_output_tokens": "max_completion_tokens"}


def parse_response_task(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Task:
    """Translate a body to the task of a chat. Raises RequestError naming the field, its value and what is
    allowed."""
    chat: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in ("input", "instructions", "tools", "tool_choice"):
            continue
        require_field(name not in STATEFUL_FIELDS, name, value, STATEFUL_FIELDS.get(name, ""))
        if name == "text":
            chat |= text_to_chat_fields(value)
        elif name == "reasoning":
            chat |= reasoning_to_chat_fields(value)
        elif name in NEUTRAL["response"]:
            require_field(
                is_among(value, NEUTRAL["response"][name]),
                name,
                value,
                "only what asks for nothing is supported",
            )
        else:
            require_field(name not in CHAT_ONLY_FIELDS, name, value, f"{CHAT_ONLY_FIELDS.get(name)} is meant")
            chat[CHAT_FIELD_BY_NAME.get(name, name)] = value
    require_field(chat.get("n", 1) == 1, "n", chat.get("n"), "a response has one answer")
    require_field(not chat.get("logprobs"), "logprobs", chat.get("logprobs"), "not in a response")
    return parse_task(
        "chat",
        None,
        chat | tools_to_chat_fields(body) | {"messages": read_input_messages(body)},
        defaults,
        None,
    )


def read_input_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat, from instructions and input."""
    response_input, instructions = body.get("input"), body.get("instructions")
    require_field(
        instructions is None or isinstance(instructions, str), "instructions", instructions, "a string"
    )
    system_messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(response_input, str):
        return [*system_messages, {"role": "user", "content": response_input}]
    require_field(
        isinstance(response_input, list) and bool(response_input),
        "input",
        response_input,
        "a string or a list of items",
    )
    messages = (parse_input_item(f"input[{i}]", item) for i, item in enumerate(response_input or []))
    return [*system_messages, *join_input_items(message for message in messages if message is not None)]


def join_input_items(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge the items of one reply, which come in the order of ASSISTANT_FIELDS. Several calls come in a
    row."""
    joined: list[dict[str, Any]] = []
    for message in messages:
        last = joined[-1] if joined else {}
        if last.get("role") == message["role"] == "assistant" and is_continuation(last, message):
            calls = [*last.get("tool_calls", ()), *message.get("tool_calls", ())]
            joined[-1] = {**last, **message} | ({"tool_calls": calls} if calls else {})
        else:
            joined.append(message)
    return joined


def is_continuation(message: Mapping[str, Any], item: Mapping[str, Any]) -> bool:
    """Return whether an item continues a message. A call continues any; another field continues a message
    that has only fields which come before it in ASSISTANT_FIELDS."""
    (field,) = item.keys() & set(ASSISTANT_FIELDS)
    return field == ASSISTANT_FIELDS[-1] or not message.keys() & set(
        ASSISTANT_FIELDS[ASSISTANT_FIELDS.index(field) :]
    )


def parse_input_item(where: str, item: Any) -> dict[str, Any] | None:
    """Return the message of an item of the input; None for reasoning without text."""
    require_field(isinstance(item, dict), where, item, "an object")
    kind = item.get("type") or "message"
    if kind == "reasoning":
        thought = parse_reasoning_item(where, item)
        return {"role": "assistant", "reasoning": thought} if thought else None
    if kind == "function_call":
        function = {name: item.get(name) for name in ("name", "arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        texts = [*function.values(), call["id"]]
        require_field(
            all(isinstance(x, str) for x in texts), where, item, "call_id, name and arguments as strings"
        )
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        id, output = item.get("call_id"), item.get("output")
        require_field(isinstance(id, str), f"{where}.call_id", id, "a string")
        return {"role": "tool", "tool_call_id": id, "content": parse_content(f"{where}.output", output)}
    kinds = "message, reasoning, function_call or function_call_output"
    require_field(kind == "message", f"{where}.type", kind, kinds)
    role, roles = item.get("role"), ("user", "assistant", "system", "developer")
    require_field(role in roles, f"{where}.role", role, " or ".join(roles))
    content = parse_content(f"{where}.content", item.get("content"))
    return {"role": "system" if role == "developer" else role, "content": content}


def parse_reasoning_item(where: str, item: Mapping[str, Any]) -> str:
    """Return the text of a reasoning item, or of its summary; a template decides which turns keep it."""
    name = "content" if item.get("content") else "summary"
    parts = item.get(name) or []
    require_field(isinstance(parts, list), f"{where}.{name}", parts, "a list of parts with text")
    thought = "\n".join(read_text_part(f"{where}.{name}[{i}]", part) for i, part in enumerate(parts))
    encrypted = item.get("encrypted_content")
    require_field(
        bool(thought) or encrypted is None, f"{where}.encrypted_content", encrypted, "reasoning as text"
    )
    return thought


def parse_content(where: str, content: Any) -> str | list[dict[str, Any]]:
    """Return a text, or several as the parts of a chat's message."""
    if isinstance(content, list):
        texts = [read_text_part(f"{where}[{i}]", part) for i, part in enumerate(content)]
        return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    require_field(isinstance(content, str), where, content, "a string or a list of parts with text")
    return content


def read_text_part(where: str, part: Any) -> str:
    if (
        not isinstance(part, dict)
        or part.get("type") not in TEXT_PART_TYPES
        or not isinstance(part.get("text"), str)
    ):
        raise RequestError("invalid_request", f"{where} is not allowed: only parts with text", "input")
    return part["text"]


@dataclass(frozen=True)
class ResponseRecord:
    """Fields that all objects of a response share.

    id: without prefix
    created: seconds since 1970
    repeated_fields: fields of the body that the response repeats
    """

    id: str
    created: int
    model: str
    task: Task
    repeated_fields: Mapping[str, Any]

    def item_id(self, kind: str, number: int = 0) -> str:
        return f"{kind}_{self.id}{number or ''}"

    def to_json(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return the response in a state, with its output so far."""
        params = self.task.params
        return {
            "id": self.item_id("resp"),
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": params.max_tokens,
            "metadata": {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": params.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "top_p": params.top_p,
            "truncation": "disabled",
            "usage": None,
            **self.repeated_fields,
            **more,
        }

    def final_json(
        self, completion_output: CompletionOutput, output: list[dict[str, Any]], usage: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the whole response, complete or cut off."""
        if completion_output.finish_reason not in INCOMPLETE_DETAILS:
            return self.to_json("completed", output, usage=usage)
        return self.to_json(
            "incomplete",
            output,
            usage=usage,
            incomplete_details=INCOMPLETE_DETAILS[completion_output.finish_reason],
        )


def message_item(id: str, text: str | None, status: str) -> dict[str, Any]:
    """Return an item of the answer; without parts if the text is None."""
    content = [] if text is None else [text_part_json(text)]
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def reasoning_item(id: str, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": id, "type": "reasoning", "summary": [], "content": content, "status": status}


def call_item(id: str, call_start: ToolCallStart, text: str, status: str) -> dict[str, Any]:
    item = {"id": id, "type": "function_call", "call_id": call_start.id, "name": call_start.name}
    return item | {"arguments": text, "status": status}


def text_part_json(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def response_usage(
    prompt_tokens: int, cached_tokens: int, completion_tokens: int, reasoning_tokens: int
) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prompt_tokens + completion_tokens,
    }

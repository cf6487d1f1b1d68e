"""Bodies of OpenAI's Responses API, without state between requests, and replies to them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ....neutral import NEUTRAL
from ....refusals import among
from ..outputs import CompletionOutput
from ..tools.stream_reader import ToolCallStart
from .errors import RequestError, require
from .fields import of_reasoning, of_response, of_text
from .tasks import Task, task_of_body

TEXT = ("input_text", "output_text", "text")  # types of parts that have text
KEPT = {
    "previous_response_id": "nothing is kept between requests: send the whole conversation as input",
    "conversation": "nothing is kept between requests: send the whole conversation as input",
    "prompt": "no prompts are kept here: send instructions and input",
}
MEANT = {"messages": "input", "max_completion_tokens": "max_output_tokens"}
RENAMED = {"max_output_tokens": "max_completion_tokens"}


def task_of_response(body: Mapping[str, Any], defaults: Mapping[str, Any]) -> Task:
    """Translate a body to the task of a chat. Raises RequestError naming the field, its value and what is
    allowed."""
    chat: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in ("input", "instructions", "tools", "tool_choice"):
            continue
        require(name not in KEPT, name, value, KEPT.get(name, ""))
        if name == "text":
            chat |= of_text(value)
        elif name == "reasoning":
            chat |= of_reasoning(value)
        elif name in NEUTRAL["response"]:
            require(
                among(value, NEUTRAL["response"][name]),
                name,
                value,
                "only what asks for nothing is supported",
            )
        else:
            require(name not in MEANT, name, value, f"{MEANT.get(name)} is meant")
            chat[RENAMED.get(name, name)] = value
    require(chat.get("n", 1) == 1, "n", chat.get("n"), "a response has one answer")
    require(not chat.get("logprobs"), "logprobs", chat.get("logprobs"), "not in a response")
    return task_of_body(
        "chat", None, chat | of_response(body) | {"messages": messages_of(body)}, defaults, None
    )


def messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the messages of a chat, from instructions and input."""
    given, instructions = body.get("input"), body.get("instructions")
    require(instructions is None or isinstance(instructions, str), "instructions", instructions, "a string")
    first = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*first, {"role": "user", "content": given}]
    require(isinstance(given, list) and bool(given), "input", given, "a string or a list of items")
    found = [message_of(f"input[{i}]", item) for i, item in enumerate(given or [])]
    return [*first, *together(message for message in found if message is not None)]


def together(messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge calls that follow a message of the assistant into it."""
    found: list[dict[str, Any]] = []
    for message in messages:
        last = found[-1] if found else {}
        if "tool_calls" in message and last.get("role") == "assistant":
            calls = [*last.get("tool_calls", ()), *message["tool_calls"]]
            found[-1] = {**last, "tool_calls": calls}
        else:
            found.append(message)
    return found


def message_of(where: str, item: Any) -> dict[str, Any] | None:
    """Return the message of an item of the input; None for earlier reasoning, which templates leave out."""
    require(isinstance(item, dict), where, item, "an object")
    kind = item.get("type", "message")
    if kind == "reasoning":
        return None
    if kind == "function_call":
        function = {name: item.get(name) for name in ("name", "arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        texts = [*function.values(), call["id"]]
        require(all(isinstance(x, str) for x in texts), where, item, "call_id, name and arguments as strings")
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        id, output = item.get("call_id"), item.get("output")
        require(isinstance(id, str), f"{where}.call_id", id, "a string")
        return {"role": "tool", "tool_call_id": id, "content": content_of(f"{where}.output", output)}
    kinds = "message, reasoning, function_call or function_call_output"
    require(kind == "message", f"{where}.type", kind, kinds)
    role, roles = item.get("role"), ("user", "assistant", "system", "developer")
    require(role in roles, f"{where}.role", role, " or ".join(roles))
    content = content_of(f"{where}.content", item.get("content"))
    return {"role": "system" if role == "developer" else role, "content": content}


def content_of(where: str, content: Any) -> str:
    if isinstance(content, list):
        content = "\n".join(text_of(f"{where}[{i}]", part) for i, part in enumerate(content))
    require(isinstance(content, str), where, content, "a string or a list of parts with text")
    return content


def text_of(where: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") not in TEXT or not isinstance(part.get("text"), str):
        raise RequestError("invalid_request", f"{where} is not allowed: only parts with text", "input")
    return part["text"]


@dataclass(frozen=True)
class Response:
    """The fields that all objects of a response share; `repeated` are fields of the body."""

    id: str
    created: int
    model: str
    task: Task
    repeated: Mapping[str, Any]

    def item_id(self, kind: str, number: int = 0) -> str:
        return f"{kind}_{self.id}{number or ''}"

    def record(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
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
            **self.repeated,
            **more,
        }

    def ended(
        self, last: CompletionOutput, output: list[dict[str, Any]], usage: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the whole response, complete or cut off."""
        if last.finish_reason == "length":
            cut = {"reason": "max_output_tokens"}
            return self.record("incomplete", output, usage=usage, incomplete_details=cut)
        return self.record("completed", output, usage=usage)


def message(id: str, text: str | None, status: str) -> dict[str, Any]:
    """Return an item of the answer; without parts if the text is None."""
    content = [] if text is None else [text_part(text)]
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def thought(id: str, text: str | None) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": id, "type": "reasoning", "summary": [], "content": content}


def call(id: str, begun: ToolCallStart, text: str, status: str) -> dict[str, Any]:
    own = {"id": id, "type": "function_call", "call_id": begun.id, "name": begun.name}
    return own | {"arguments": text, "status": status}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage(prompt_tokens: int, cached_tokens: int, tokens: int, thoughts: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": tokens,
        "output_tokens_details": {"reasoning_tokens": thoughts},
        "total_tokens": prompt_tokens + tokens,
    }

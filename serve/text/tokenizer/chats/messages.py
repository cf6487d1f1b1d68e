"""Messages of a conversation, checked, with the names that chat templates read."""

import json
from collections.abc import Callable, Iterator
from typing import Any

from ..surrogates import replace_lone_surrogates

ChatMessage = dict[str, Any]
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ChatTemplateError(ValueError):
    """A conversation that cannot be rendered: malformed messages, no template, or an error of the
    template."""


def normalise_messages(messages: Any) -> list[ChatMessage]:
    """Return messages as any template may read them. No field lacks a value, no list of calls is empty, and
    arguments of calls are objects. Reasoning has all names that templates have for it. Raises
    ChatTemplateError with the place of the error."""
    if not isinstance(messages, list) or not messages:
        raise ChatTemplateError(
            f"messages must be a list of at least one message, not {_kind_name(messages)}"
        )
    return [_normalise_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _normalise_message(where: str, message: Any) -> ChatMessage:
    if not isinstance(message, dict):
        raise ChatTemplateError(f"{where} must be an object with role and content, not {_kind_name(message)}")
    if not isinstance(message.get("role"), str):
        raise ChatTemplateError(f"{where}.role must be a string, not {_kind_name(message.get('role'))}")
    checked = copy_reasoning({name: value for name, value in message.items() if value is not None})
    if "tool_calls" in checked:
        calls = _normalise_calls(f"{where}.tool_calls", checked.pop("tool_calls"))
        checked |= {"tool_calls": calls} if calls else {}
    _check_content(f"{where}.content", checked)
    return checked


def copy_reasoning(message: ChatMessage) -> ChatMessage:
    """Return a message whose reasoning has the names `reasoning_content` and, for gpt-oss, `thinking`, as in
    Transformers."""
    thought = next((message[name] for name in REASONING_FIELDS if name in message), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def _check_content(where: str, message: ChatMessage) -> None:
    """Check the content of a message, which a reply of the model need not have."""
    content = message.get("content")
    if isinstance(content, list):
        for i, part in enumerate(content):
            if not (
                isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
            ):
                raise ChatTemplateError(
                    f'{where}[{i}] must be {{"type": "text", "text": ...}}: only text is understood'
                )
    elif not (isinstance(content, str) or (content is None and message["role"] == "assistant")):
        raise ChatTemplateError(
            f"{where} must be a string or a list of text parts, not {_kind_name(content)}"
        )


def _normalise_calls(where: str, calls: Any) -> list[Any]:
    """Return calls with their arguments as objects: OpenAI's clients send them as JSON text."""
    if not isinstance(calls, list):
        raise ChatTemplateError(f"{where} must be a list, not {_kind_name(calls)}")
    checked = []
    for i, call in enumerate(calls):
        if not isinstance(call, dict):
            raise ChatTemplateError(f"{where}[{i}] must be an object, not {_kind_name(call)}")
        call = order_and_drop_nulls(call, ("id", "type", "function"))
        if isinstance(function := call.get("function"), dict):
            arguments = {"arguments": read_arguments(function.get("arguments"))}
            call = call | {"function": order_and_drop_nulls(function | arguments, ("name", "arguments"))}
        checked.append(call)
    return checked


def order_and_drop_nulls(record: dict[str, Any], first: tuple[str, ...]) -> dict[str, Any]:
    """Return an object without nulls and with these fields first, in the order of OpenAI's reference. A
    template may print it as JSON, and clients write fields in any order."""
    names = dict.fromkeys((*first, *record))
    return {name: record[name] for name in names if record.get(name) is not None}


def _kind_name(value: Any) -> str:
    names = {type(None): "nothing", dict: "an object", list: "an empty list" if value == [] else "a list"}
    return names.get(type(value), f"{type(value).__name__} {value!r:.40}")


# ---------------------------------------------------------------- values in JSON


class CallArguments(dict[str, Any]):
    """The arguments of a call. Templates that read JSON text get the text that they came as; its name begins
    with an underscore, since a template reads `arguments.x` as an attribute first."""

    def __init__(self, values: dict[str, Any], text: str):
        super().__init__(values)
        self._text = text


def read_arguments(value: Any) -> dict[str, Any]:
    """Return the arguments of a call, which clients send as an object or as its JSON text. Anything else is
    read as `{}`, as in vLLM: an answer that was cut holds half an object, and no later turn may fail on
    it."""
    if isinstance(value, dict):
        return value
    text = replace_lone_surrogates(value) if isinstance(value, str) else ""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    return CallArguments(values, text) if isinstance(values, dict) else CallArguments({}, "{}")


def arguments_text(arguments: dict[str, Any]) -> str:
    return arguments._text if isinstance(arguments, CallArguments) else dump_json(arguments)


def dump_json(value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Write JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def iterate_scalars(value: Any) -> Iterator[Any]:
    """Yield the values in a value of JSON that are no lists or objects, and the keys."""
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, (dict, list, tuple)):
            stack += reversed([*value, *value.values()] if isinstance(value, dict) else value)
        else:
            yield value


def iterate_strings(value: Any) -> Iterator[str]:
    """Return the strings of a value of JSON, keys included."""
    return (scalar for scalar in iterate_scalars(value) if isinstance(scalar, str))


def map_strings(value: Any, change_string: Callable[[str], str]) -> Any:
    """Return JSON values with each string changed, keys and the text of arguments included."""
    if isinstance(value, str):
        return change_string(value)
    if isinstance(value, dict):
        values = {change_string(key): map_strings(item, change_string) for key, item in value.items()}
        return (
            CallArguments(values, change_string(value._text)) if isinstance(value, CallArguments) else values
        )
    if isinstance(value, (list, tuple)):
        return [map_strings(item, change_string) for item in value]
    return value

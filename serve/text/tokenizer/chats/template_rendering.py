"""Chat templates compiled, and the form of content that each reads, found by rendering small conversations: a
template is a program, and says nowhere what it takes."""

from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .messages import ChatMessage, arguments_text, dump_json

if TYPE_CHECKING:
    import jinja2

PROBED_ROLES = ("system", "developer", "user", "assistant", "tool")  # whose content is tried in other forms
FIRST_TEXT, SECOND_TEXT = "alpha", "omega"  # texts of a tried message
PROBE_NAME = "probed_function"
PROBE_FUNCTION = {
    "name": PROBE_NAME,
    "description": PROBE_NAME,
    "parameters": {"type": "object", "properties": {}},
}
PROBE_TOOL = {"type": "function", "function": PROBE_FUNCTION}
PROBE_CALL = {"id": "probed012", "type": "function", "function": {"name": PROBE_NAME, "arguments": {}}}
PROBE_QUESTION, PROBE_CALL_MESSAGE = (
    {"role": "user", "content": FIRST_TEXT},
    {"role": "assistant", "tool_calls": [PROBE_CALL]},
)
EMPTY_CONTENTS = ({}, {"content": None}, {"content": ""})  # ways to say that a message has calls and no text


def fit_messages(template: str, messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return checked messages with content in forms that the template reads. A list of parts stays one where
    the template reads the parts of the role; elsewhere its texts are joined by newlines, as in vLLM."""
    return [fit_content(template, message) for message in messages]


def fit_content(template: str, message: ChatMessage) -> ChatMessage:
    if "content" not in message:
        return message | (choose_empty_content(template) if message.get("tool_calls") else {"content": ""})
    content, role = message["content"], message["role"]
    if isinstance(content, list) and not supports_parts(template, role):
        return {**message, "content": "\n".join(part["text"] for part in content)}
    if isinstance(content, str) and needs_parts(template, role):
        return {**message, "content": [wrap_text_part(content)]}
    return message


def wrap_text_part(text: str) -> dict[str, str]:
    """Return a text as a part of a message."""
    return {"type": "text", "text": text}


@lru_cache(maxsize=256)
def supports_parts(template: str, role: str) -> bool:
    """Return whether a template writes the texts of a list of parts; if it prints the list, their keys are
    between these."""
    if role not in PROBED_ROLES:
        return False
    text = render_probe(
        template, make_probe_messages(role, [wrap_text_part(FIRST_TEXT), wrap_text_part(SECOND_TEXT)])
    )
    _, first, rest = text.partition(FIRST_TEXT)
    between, second, _ = rest.partition(SECOND_TEXT)
    return bool(first and second) and "text" not in between


@lru_cache(maxsize=256)
def needs_parts(template: str, role: str) -> bool:
    """Return whether a template reads lists of parts, and leaves out a string."""
    return supports_parts(template, role) and FIRST_TEXT not in render_probe(
        template, make_probe_messages(role, FIRST_TEXT)
    )


@lru_cache(maxsize=64)
def choose_empty_content(template: str) -> dict[str, Any]:
    """Return the content of a message with calls alone, for a template. It has none, as in Transformers,
    unless the template fails on that or leaves the calls out; then it is null, or an empty string."""
    texts = [
        render_probe(template, [PROBE_QUESTION, PROBE_CALL_MESSAGE | silent, PROBE_QUESTION])
        for silent in EMPTY_CONTENTS
    ]
    with_calls = [silent for silent, text in zip(EMPTY_CONTENTS, texts, strict=True) if PROBE_NAME in text]
    rendered = [silent for silent, text in zip(EMPTY_CONTENTS, texts, strict=True) if text]
    return (with_calls or rendered or EMPTY_CONTENTS)[0]


def make_probe_messages(role: str, content: Any) -> list[ChatMessage]:
    """Return a short conversation in which a message of the role has this content."""
    other = {"role": "user", "content": "probed"}
    message = {"role": role, "content": content}
    if role == "tool":
        call_message = PROBE_CALL_MESSAGE | {"content": ""}
        return [other, call_message, message | {"tool_call_id": PROBE_CALL["id"], "name": PROBE_NAME}]
    return [message] if role == "user" else [*([other] if role == "assistant" else []), message, other]


def render_probe(template: str, messages: list[ChatMessage]) -> str:
    """Render a conversation without tools, or with one if that fails; "" if both do."""
    variables = {"messages": messages, "documents": None, "add_generation_prompt": False, "bos_token": ""}
    variables |= {"eos_token": "", "strftime_now": datetime.now().strftime}
    for tools in (None, [PROBE_TOOL]):
        with suppress(Exception):  # a template is a program of others: it may raise anything
            return render_template(template, variables | {"tools": tools})
    return ""


def render_template(template: str, variables: dict[str, Any]) -> str:
    """Render a template. DeepSeek's concatenate a call's arguments to text, and fail if these are objects:
    then they are rendered again with JSON text."""
    compiled = compile_chat_template(template)
    try:
        return compiled.render(**variables)
    except TypeError:
        messages = [write_arguments_as_text(message) for message in variables["messages"]]
        if messages == variables["messages"]:
            raise
        return compiled.render(**variables | {"messages": messages})


def write_arguments_as_text(message: ChatMessage) -> ChatMessage:
    """Return a message with the arguments of its calls as JSON text, as the client wrote it."""
    calls = [
        {**call, "function": {**function, "arguments": arguments_text(function["arguments"])}}
        if isinstance(function := call.get("function"), dict) and isinstance(function.get("arguments"), dict)
        else call
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


@lru_cache(maxsize=64)
def compile_chat_template(template: str) -> "jinja2.Template":
    """Return the template in the environment that chat templates are written for."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks the model's text for training; in a prompt it has no effect."""

        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_template_error(message: str):
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = dump_json
    environment.globals["raise_exception"] = raise_template_error
    return environment.from_string(template)

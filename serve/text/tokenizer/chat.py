"""Chat templates: from a conversation to the prompt that a model was trained on, in Jinja2's sandbox as in
Transformers."""

import json
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from .hiding import hidden, strings_in

if TYPE_CHECKING:
    import jinja2

    from .tokenizer import Tokenizer

Message = dict[str, Any]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SWITCHES = ("enable_thinking", "thinking")  # names of templates for a switch of reasoning
# Variables of a chat template that a request may not set.
TEMPLATE_OWN = frozenset(
    {"chat_template", "template", "tokenizer", "messages", "tools", "bos_token", "eos_token"}
    | {"add_generation_prompt", "now"}
)
MARK = "\ue000end of the text to continue\ue000"  # of private-use characters, which no template looks for


class ChatTemplateError(ValueError):
    """A conversation that cannot be rendered: malformed messages, no template, or an error of the
    template."""


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Return the variables under which chat templates know an effort of reasoning. Raises ValueError for an
    unknown one."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise ValueError(f"reasoning_effort={effort!r} is not allowed: {' or '.join(EFFORTS)}")
    return {"reasoning_effort": effort, **dict.fromkeys(SWITCHES, effort != "none")}


def apply_chat(
    tokenizer: "Tokenizer", messages: list[Message], most: int | None = None, /, **options: Any
) -> list[int]:
    """Return the token ids of a conversation; the template writes the special tokens, so none is added.
    Options are those of `render_for`. Raises ChatTemplateError, and ValueError as `Tokenizer.encode` does for
    `most`."""
    return rendered_ids(tokenizer, messages, most, **options)[1]


def rendered_ids(
    tokenizer: "Tokenizer", messages: list[Message], most: int | None = None, /, **options: Any
) -> tuple[str, list[int]]:
    """Return the text and the token ids of a conversation. Special tokens in messages, tools and documents
    are special too, unless `tokenizer.split_special_tokens`."""
    mark = ""
    if tokenizer.split_special_tokens:
        others = {name: options[name] for name in ("tools", "documents") if name in options}
        whole = {"messages": check_messages(messages)} | others
        tokenizer.check_length("".join(strings_in(whole)), most)
        whole, mark = hidden(whole, tokenizer.convert_ids_to_tokens(tokenizer.special_ids))
        messages, options = whole.pop("messages"), options | whole
    text = render_for(tokenizer, messages, **options)
    ids = tokenizer.encode(text, add_special_tokens=False, most=most, mark=mark)
    return text.replace(mark, "") if mark else text, ids


def render_for(
    tokenizer: "Tokenizer", messages: list[Message], *, chat_template: str | None = None, **options: Any
) -> str:
    """Render a conversation with a tokenizer's special tokens, and its template unless another is given,
    itself or by name. Raises ChatTemplateError without a template."""
    template = tokenizer.template_for(chat_template, options.get("tools") is not None)
    if template is None:
        raise ChatTemplateError("the model has no chat template; give a prompt instead of messages")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return render_chat(template, messages, **{name: getattr(tokenizer, name) for name in names} | options)


def render_chat(
    template: str,
    messages: list[Message],
    *,
    bos_token: str | None,
    eos_token: str | None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    documents: list[dict[str, Any]] | None = None,
    now: datetime | None = None,
    **kwargs: Any,
) -> str:
    """Return the prompt text of a conversation. `now` is the time that a template may write down (default:
    the clock's). `kwargs` are variables of the template; special tokens that are None are left out. With
    `continue_final_message` the text ends in the last message. Raises ChatTemplateError for malformed
    messages and any error of the template."""
    if continue_final_message and add_generation_prompt:
        raise ChatTemplateError(
            "continue_final_message needs add_generation_prompt=False: a reply is begun, or continued"
        )
    checked = check_messages(messages)
    tokens = {"bos_token": bos_token, "eos_token": eos_token}
    variables = {k: v for k, v in (tokens | kwargs).items() if v is not None or not k.endswith("_token")}
    variables["messages"] = marked(checked) if continue_final_message else checked
    variables |= {"tools": tools, "documents": documents}
    variables["strftime_now"] = lambda form: (now or datetime.now()).strftime(form)
    variables["add_generation_prompt"] = add_generation_prompt
    try:
        text = rendered(_compile(template), variables)
    except Exception as error:  # a template is a program of others: it may raise anything
        raise ChatTemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error
    return up_to_mark(text) if continue_final_message else text


def rendered(template: "jinja2.Template", variables: dict[str, Any]) -> str:
    """Render a template. DeepSeek's concatenate a call's arguments to text, and fail if these are objects:
    then they are rendered again with JSON text."""
    try:
        return template.render(**variables)
    except TypeError:
        messages = [spelled(message) for message in variables["messages"]]
        if messages == variables["messages"]:
            raise
        return template.render(**variables | {"messages": messages})


def spelled(message: Message) -> Message:
    """Return a message with the arguments of its calls as JSON text."""
    calls = [
        {**call, "function": {**function, "arguments": _tojson(function["arguments"])}}
        if isinstance(function := call.get("function"), dict) and isinstance(function.get("arguments"), dict)
        else call
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def marked(messages: list[Message]) -> list[Message]:
    """Return messages with MARK at the end of the last one's text."""
    content = messages[-1].get("content")
    if not content:
        raise ChatTemplateError(
            "continue_final_message: the last message has no text that could be continued"
        )
    return [*messages[:-1], {**messages[-1], "content": content + MARK}]


def up_to_mark(text: str) -> str:
    before, found, _ = text.rpartition(MARK)
    if not found:
        raise ChatTemplateError(
            "continue_final_message: the chat template leaves the last message's text out"
        )
    return before


def check_messages(messages: Any) -> list[Message]:
    """Return messages as templates expect them: content as a string (text parts joined by newlines), tool
    arguments as objects, no fields without a value, and reasoning under all names that templates have for it.
    Raises ChatTemplateError with the place of the error."""
    if not isinstance(messages, list) or not messages:
        raise ChatTemplateError(f"messages must be a list of at least one message, not {_kind(messages)}")
    return [_check_message(f"messages[{i}]", message) for i, message in enumerate(messages)]


def _check_message(where: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise ChatTemplateError(f"{where} must be an object with role and content, not {_kind(message)}")
    if not isinstance(message.get("role"), str):
        raise ChatTemplateError(f"{where}.role must be a string, not {_kind(message.get('role'))}")
    checked = reasoned({name: value for name, value in message.items() if value is not None})
    if "tool_calls" in checked:
        checked["tool_calls"] = _check_calls(f"{where}.tool_calls", message["tool_calls"])
    content = message.get("content")
    if isinstance(content, list):
        checked["content"] = _join_parts(f"{where}.content", content)
    elif not (isinstance(content, str) or (content is None and checked.get("tool_calls"))):
        raise ChatTemplateError(
            f"{where}.content must be a string or a list of text parts, not {_kind(content)}"
        )
    return checked


def reasoned(message: Message) -> Message:
    """Return a message whose reasoning has the names `reasoning_content` and, for gpt-oss, `thinking`, as in
    Transformers."""
    found = [message[name] for name in ("reasoning_content", "thinking", "reasoning") if name in message]
    return {"thinking": found[0], **message, "reasoning_content": found[0]} if found else message


def _join_parts(where: str, parts: list[Any]) -> str:
    for i, part in enumerate(parts):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ChatTemplateError(
                f'{where}[{i}] must be {{"type": "text", "text": ...}}: only text is understood'
            )
    return "\n".join(part["text"] for part in parts)


def _check_calls(where: str, calls: Any) -> list[Any]:
    """Return calls with their arguments as objects: OpenAI's clients send them as JSON text."""
    if not isinstance(calls, list):
        raise ChatTemplateError(f"{where} must be a list, not {_kind(calls)}")
    checked = []
    for i, call in enumerate(calls):
        if not isinstance(call, dict):
            raise ChatTemplateError(f"{where}[{i}] must be an object, not {_kind(call)}")
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except (ValueError, RecursionError) as error:
                name = f"{where}[{i}].function.arguments"
                deep = "it is nested too deeply" if isinstance(error, RecursionError) else error
                raise ChatTemplateError(f"{name} is not valid JSON: {deep}") from error
            call = {**call, "function": {**function, "arguments": arguments}}
        checked.append(call)
    return checked


def _kind(value: Any) -> str:
    names = {type(None): "nothing", dict: "an object", list: "an empty list" if value == [] else "a list"}
    return names.get(type(value), f"{type(value).__name__} {value!r:.40}")


@lru_cache(maxsize=64)
def _compile(template: str) -> "jinja2.Template":
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

    def refuse(message: str):
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = refuse
    return environment.from_string(template)


def _tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Write JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )

"""Chat templates: from a conversation to the prompt that a model was trained on, in Jinja2's sandbox as in
Transformers."""

from datetime import datetime
from typing import TYPE_CHECKING, Any

from ..special_token_marks import hide_special_tokens
from .messages import ChatMessage, ChatTemplateError, iterate_strings, normalise_messages
from .template_rendering import fit_messages, render_template

if TYPE_CHECKING:
    from ..tokenizer import Tokenizer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
REASONING_SWITCHES = ("enable_thinking", "thinking")  # names of templates for a switch of reasoning
# Variables of a chat template that a request may not set.
RESERVED_VARIABLES = frozenset(
    {"chat_template", "template", "tokenizer", "messages", "tools", "bos_token", "eos_token"}
    | {"add_generation_prompt", "continue_final_message", "add_special_tokens", "now"}
)
# Has private-use characters, so that no template contains it.
END_MARK = "\ue000end of the text to continue\ue000 "


def effort_variables(effort: str | None) -> dict[str, Any]:
    """Return the variables under which chat templates know an effort of reasoning. Raises ValueError for an
    unknown one."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise ValueError(f"reasoning_effort={effort!r} is not allowed: {' or '.join(EFFORTS)}")
    return {"reasoning_effort": effort, **dict.fromkeys(REASONING_SWITCHES, effort != "none")}


def tokenize_chat(
    tokenizer: "Tokenizer", messages: list[ChatMessage], max_tokens: int | None = None, /, **options: Any
) -> list[int]:
    """Return the token ids of a conversation. Takes the options of `render_and_tokenize`. Raises
    ChatTemplateError, and ValueError as `Tokenizer.encode` does for `max_tokens`."""
    return render_and_tokenize(tokenizer, messages, max_tokens, **options)[1]


def render_and_tokenize(
    tokenizer: "Tokenizer",
    messages: list[ChatMessage],
    max_tokens: int | None = None,
    /,
    add_special_tokens: bool = False,
    **options: Any,
) -> tuple[str, list[int]]:
    """Return the text and the token ids of a conversation. Passes further options to `render_with_tokenizer`.

    The template writes the special tokens; `add_special_tokens` adds others. Special tokens in messages,
    tools and documents are special too, unless `tokenizer.split_special_tokens`.
    """
    mark = ""
    if tokenizer.split_special_tokens:
        others = {name: options[name] for name in ("tools", "documents") if name in options}
        json_values = {"messages": normalise_messages(messages)} | others
        tokenizer.check_length("".join(iterate_strings(json_values)), max_tokens)
        json_values, mark = hide_special_tokens(
            json_values, tokenizer.convert_ids_to_tokens(tokenizer.special_ids)
        )
        messages, options = json_values.pop("messages"), options | json_values
    text = render_with_tokenizer(tokenizer, messages, **options)
    ids = tokenizer.encode(text, add_special_tokens, max_tokens, mark)
    return text.replace(mark, "") if mark else text, ids


def render_with_tokenizer(
    tokenizer: "Tokenizer", messages: list[ChatMessage], *, chat_template: str | None = None, **options: Any
) -> str:
    """Render a conversation with a tokenizer's special tokens, and its template unless another is given,
    itself or by name. Raises ChatTemplateError without a template."""
    template = tokenizer.get_chat_template(chat_template, options.get("tools") is not None)
    if template is None:
        raise ChatTemplateError("the model has no chat template; give a prompt instead of messages")
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    return render_chat(template, messages, **{name: getattr(tokenizer, name) for name in names} | options)


def render_chat(
    template: str,
    messages: list[ChatMessage],
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
    fitted_messages = fit_messages(template, normalise_messages(messages))
    tokens = {"bos_token": bos_token, "eos_token": eos_token}
    variables = {k: v for k, v in (tokens | kwargs).items() if v is not None or not k.endswith("_token")}
    variables["messages"] = append_end_mark(fitted_messages) if continue_final_message else fitted_messages
    variables |= {"tools": tools, "documents": documents}
    variables["strftime_now"] = lambda form: (now or datetime.now()).strftime(form)
    variables["add_generation_prompt"] = add_generation_prompt
    try:
        text = render_template(template, variables)
    except Exception as error:  # a template is a program of others: it may raise anything
        raise ChatTemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error
    return cut_at_end_mark(text) if continue_final_message else text


def append_end_mark(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return messages with END_MARK at the end of the last one's text."""
    content = messages[-1].get("content")
    if isinstance(content, list) and content:
        last = content[-1]
        content = [*content[:-1], last | {"text": last["text"] + END_MARK}]
    elif content:
        content += END_MARK
    else:
        raise ChatTemplateError(
            "continue_final_message: the last message has no text that could be continued"
        )
    return [*messages[:-1], {**messages[-1], "content": content}]


def cut_at_end_mark(text: str) -> str:
    """Return the text before the mark. If the template has trimmed the white space behind the mark, the text
    is trimmed too."""
    before, mark, after = text.rpartition(END_MARK.rstrip())
    if not mark:
        raise ChatTemplateError(
            "continue_final_message: the chat template leaves the last message's text out"
        )
    return before if after.startswith(" ") else before.rstrip()

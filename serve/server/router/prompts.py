"""Names of the pages of a prompt in a router, and how many tokens a request counts for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ....kvcache.page_hash import extend, root
from ...kv.routing.placement import Prompt
from ...text.openai.fields import of_response
from ...text.tokenizer.chat import ChatTemplateError, apply_chat, check_messages
from ...text.tokenizer.tokenizer import Tokenizer

LETTERS = 4  # bytes of text per token, about
MOST = 1 << 17  # tokens of a prompt that are named
MOST_ID = 1 << 31  # bound of token ids; replicas reject others
Naming = Callable[[str, Mapping[str, Any]], Prompt]  # names the pages of the first prompt of a path's body
TEXT, TOKENS = root("text"), root("tokens")


class TextNaming:
    """Names pieces of a prompt's text: equal texts begin with equal tokens. It needs nothing of the model and
    takes microseconds where a tokenizer takes milliseconds, but KV cache events cannot be matched with these
    names."""

    def __init__(self, page_size: int):
        self.page_size = page_size

    def __call__(self, path: str, body: Mapping[str, Any]) -> Prompt:
        given = first_prompt(path, body)
        if is_ids(given):
            return named(given, self.page_size, TOKENS)
        whole = given if isinstance(given, str) else [tools_of(path, body), given]
        text = whole if isinstance(whole, str) else msgspec.json.encode(whole).decode()
        letters = memoryview(text.encode(errors="replace")[: MOST * LETTERS])
        found = named(letters, self.page_size * LETTERS, TEXT)
        return Prompt(found.names, self.page_size, found.tokens // LETTERS)


class TokenNaming:
    """Names pages of tokens, as the prefix caches of the replicas do."""

    def __init__(self, tokenizer: Tokenizer, page_size: int):
        self.tokenizer, self.page_size = tokenizer, page_size

    def __call__(self, path: str, body: Mapping[str, Any]) -> Prompt:
        given = first_prompt(path, body)
        try:
            ids = given if is_ids(given) else self._ids(given, tools_of(path, body), body)
            return named(ids, self.page_size, TOKENS)
        except (ChatTemplateError, ValueError, TypeError):
            return Prompt()  # a replica reports the error

    def _ids(self, given: Any, tools: Any, body: Mapping[str, Any]) -> list[int]:
        if isinstance(given, str):
            return self.tokenizer.encode(given, most=MOST)
        variables = body.get("chat_template_kwargs") or {}
        return apply_chat(self.tokenizer, check_messages(given), MOST, tools=tools, **variables)


def first_prompt(path: str, body: Mapping[str, Any]) -> Any:
    """Return the first prompt of a body: text, token ids or messages."""
    return prompts_in(path, body)[0]


def prompts_in(path: str, body: Mapping[str, Any]) -> list[Any]:
    """Return all prompts of a body, at least one."""
    if path.endswith("/chat/completions"):
        return [body.get("messages") or []]
    if path.endswith("/responses"):
        return [messages_of(body)]
    given = body.get("input") if path.endswith("/embeddings") else body.get("prompt")
    if isinstance(given, list) and given and isinstance(given[0], (str, list)):
        return given
    return [given or ""]


def tools_of(path: str, body: Mapping[str, Any]) -> Any:
    """Return the tools that the chat template gets; None without tools."""
    return (of_response(body) if path.endswith("/responses") else body).get("tools") or None


def messages_of(body: Mapping[str, Any]) -> list[Any]:
    """Return approximately the messages that the template of a response gets."""
    given, instructions = body.get("input"), body.get("instructions")
    before = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(given, str):
        return [*before, {"role": "user", "content": given}]
    return [*before, *(given if isinstance(given, list) else ())]


def is_ids(given: Any) -> bool:
    return (
        isinstance(given, list) and {*map(type, given)} == {int} and 0 <= min(given) <= max(given) < MOST_ID
    )


def named(tokens: Sequence[int], page_size: int, start: bytes) -> Prompt:
    names: list[bytes] = []
    extend(names, tokens, min(len(tokens), MOST) // page_size, page_size, start)
    return Prompt(names, page_size, len(tokens))


# ---------------------------------------------------------------- tokens of a request

# Fields that bound an answer; the first one in a body counts.
BOUNDS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/responses": ("max_output_tokens", "max_tokens"),
}
UNBOUNDED = {"/v1/completions": 16}  # tokens of an answer without a bound in its body
ROOM = 1 << 12  # the same, for answers that may fill the model's length, which a router does not know
CHOICES = 128  # completions of a request at most


def charge(path: str, fields: Mapping[str, Any], prompt: Prompt) -> int:
    """Return the tokens that a request counts for in its client's share, at least 1: those of all prompts, of
    which the first is known as `prompt`, and those that all answers may have."""
    prompts = prompts_in(path, fields)
    read = prompt.tokens + sum(map(size, prompts[1:]))
    names = BOUNDS.get(path, ())
    if not names:
        return max(1, read)
    given = next((fields[name] for name in names if fields.get(name) is not None), None)
    choices = len(prompts) * allowed(fields.get("n"), 1, CHOICES)
    return max(1, read + choices * allowed(given, UNBOUNDED.get(path, ROOM), MOST))


def allowed(value: Any, default: int, most: int) -> int:
    """Return a number of a body, at most `most`; `default` for one that replicas reject."""
    return min(value, most) if type(value) is int and value > 0 else default


def size(prompt: Any) -> int:
    """Return about how many tokens a text has, or how many ids a list has."""
    if isinstance(prompt, str):
        return len(prompt) // LETTERS
    return len(prompt) if isinstance(prompt, list) else 0

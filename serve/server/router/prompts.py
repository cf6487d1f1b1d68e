"""What the pages of a prompt are called here, before any replica has read it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ....kvcache.page_hash import extend, root
from ...kv.routing.placement import Prompt
from ...text.openai.toolboxes import of_response
from ...text.tokenizer.chat import ChatTemplateError, apply_chat, check_messages
from ...text.tokenizer.tokenizer import Tokenizer

LETTERS = 4  # bytes of text that are about a token
MOST = 1 << 17  # tokens of a prompt that are looked at
MOST_ID = 1 << 31  # ids are below it in names of pages; a replica refuses others
TEXT, TOKENS = root("text"), root("tokens")


class Naming(Protocol):
    """How prompts are named."""

    def __call__(self, path: str, body: Mapping[str, Any]) -> Prompt: ...


class TextNaming:
    """Names of pieces of a prompt's text: equal texts begin with equal tokens. It needs nothing of the model,
    and takes microseconds where a tokenizer takes milliseconds; what a replica says of its pages cannot be
    read this way."""

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
    """Names of pages of tokens, as the replicas' caches have them."""

    def __init__(self, tokenizer: Tokenizer, page_size: int):
        self.tokenizer, self.page_size = tokenizer, page_size

    def __call__(self, path: str, body: Mapping[str, Any]) -> Prompt:
        given = first_prompt(path, body)
        try:
            ids = given if is_ids(given) else self._ids(given, tools_of(path, body), body)
            return named(ids, self.page_size, TOKENS)
        except (ChatTemplateError, ValueError, TypeError):
            return Prompt()  # what is wrong with it a replica says

    def _ids(self, given: Any, tools: Any, body: Mapping[str, Any]) -> list[int]:
        if isinstance(given, str):
            return self.tokenizer.encode(given, most=MOST)
        variables = body.get("chat_template_kwargs") or {}
        return apply_chat(self.tokenizer, check_messages(given), MOST, tools=tools, **variables)


def first_prompt(path: str, body: Mapping[str, Any]) -> Any:
    """The text, token ids or messages that a body asks about; of several prompts the first."""
    return prompts_in(path, body)[0]


def prompts_in(path: str, body: Mapping[str, Any]) -> list[Any]:
    """All that a body asks about; at least one."""
    if path.endswith("/chat/completions"):
        return [body.get("messages") or []]
    if path.endswith("/responses"):
        return [messages_of(body)]
    given = body.get("input") if path.endswith("/embeddings") else body.get("prompt")
    if isinstance(given, list) and given and isinstance(given[0], (str, list)):
        return given
    return [given or ""]


def tools_of(path: str, body: Mapping[str, Any]) -> Any:
    """The tools that a chat's template is given; None where there are none."""
    return (of_response(body) if path.endswith("/responses") else body).get("tools") or None


def messages_of(body: Mapping[str, Any]) -> list[Any]:
    """About what a response's template is given."""
    given, told = body.get("input"), body.get("instructions")
    before = [{"role": "system", "content": told}] if told else []
    if isinstance(given, str):
        return [*before, {"role": "user", "content": given}]
    return [*before, *(given if isinstance(given, list) else ())]


def is_ids(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(type(i) is int and 0 <= i < MOST_ID for i in given)


def named(tokens: Sequence[int], page_size: int, start: bytes) -> Prompt:
    names: list[bytes] = []
    extend(names, tokens, min(len(tokens), MOST) // page_size, page_size, start)
    return Prompt(names, page_size, len(tokens))

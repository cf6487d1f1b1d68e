"""Hashes of the pages of a prompt in a router, and how many tokens a request counts for."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from ....kvcache.page_hash import extend_page_hashes, root_hash
from ...kv.routing.placement import RoutedPrompt
from ...text.cache_salt import hash_salt, is_cache_salt
from ...text.openai.fields import tools_to_chat_fields
from ...text.tokenizer.chats.chat import (
    RESERVED_VARIABLES,
    ChatTemplateError,
    normalise_messages,
    tokenize_chat,
)
from ...text.tokenizer.tokenizer import Tokenizer

BYTES_PER_TOKEN = 4  # bytes of text per token, about
MAX_HASHED_TOKENS = 1 << 17  # tokens of a prompt that are hashed
TOKEN_ID_BOUND = 1 << 31  # token ids are below this; replicas reject others
# (path, body) -> the body's first prompt, with its page hashes
PageHasher = Callable[[str, Mapping[str, Any]], RoutedPrompt]
TEXT_ROOT, TOKENS_ROOT = root_hash("text"), root_hash("tokens")


class TextPageHasher:
    """Hashes the pages of a prompt by pieces of its text: equal texts begin with equal tokens.

    It needs no tokenizer, and takes microseconds instead of milliseconds. KV cache events have other hashes,
    so they cannot be used with it.
    """

    def __init__(self, page_size: int):
        self.page_size = page_size

    def __call__(self, path: str, body: Mapping[str, Any]) -> RoutedPrompt:
        prompt, salt = first_prompt(path, body), hash_body_salt(body)
        if is_token_ids(prompt):
            return hash_pages(prompt, self.page_size, TOKENS_ROOT + salt)
        content = prompt if isinstance(prompt, str) else [body_tools(path, body), prompt]
        text = content if isinstance(content, str) else msgspec.json.encode(content).decode()
        text_bytes = memoryview(text.encode(errors="replace")[: MAX_HASHED_TOKENS * BYTES_PER_TOKEN])
        hashed_prompt = hash_pages(text_bytes, self.page_size * BYTES_PER_TOKEN, TEXT_ROOT + salt)
        return RoutedPrompt(
            hashed_prompt.page_hashes, self.page_size, hashed_prompt.tokens // BYTES_PER_TOKEN
        )


class TokenPageHasher:
    """Hashes the pages of a prompt by its tokens, as the prefix caches of the replicas do."""

    def __init__(self, tokenizer: Tokenizer, page_size: int):
        self.tokenizer, self.page_size = tokenizer, page_size

    def __call__(self, path: str, body: Mapping[str, Any]) -> RoutedPrompt:
        prompt = first_prompt(path, body)
        try:
            ids = prompt if is_token_ids(prompt) else self._token_ids(prompt, body_tools(path, body), body)
            return hash_pages(ids, self.page_size, TOKENS_ROOT + hash_body_salt(body))
        except (ChatTemplateError, ValueError, TypeError):
            return RoutedPrompt()  # a replica reports the error

    def _token_ids(self, prompt: Any, tools: Any, body: Mapping[str, Any]) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, max_tokens=MAX_HASHED_TOKENS)
        variables = body.get("chat_template_kwargs") or {}
        if RESERVED_VARIABLES.intersection(variables):  # replicas reject these, and a template is a program
            raise ChatTemplateError("chat_template_kwargs is not allowed")
        return tokenize_chat(
            self.tokenizer, normalise_messages(prompt), MAX_HASHED_TOKENS, tools=tools, **variables
        )


def hash_body_salt(body: Mapping[str, Any]) -> bytes:
    """Return the hash of a body's cache salt, which goes into its page hashes. Returns b"" without a salt,
    and for a wrong one, which replicas reject."""
    salt = body.get("cache_salt")
    return hash_salt(salt) if is_cache_salt(salt) else b""


def first_prompt(path: str, body: Mapping[str, Any]) -> Any:
    """Return the first prompt of a body: text, token ids or messages."""
    return body_prompts(path, body)[0]


def body_prompts(path: str, body: Mapping[str, Any]) -> list[Any]:
    """Return the prompts of a body: one or more, each text, token ids or messages."""
    if path.endswith("/chat/completions"):
        return [body.get("messages") or []]
    if path.endswith("/responses"):
        return [response_messages(body)]
    prompt = body.get("input") if path.endswith("/embeddings") else body.get("prompt")
    if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
        return prompt
    return [prompt or ""]


def body_tools(path: str, body: Mapping[str, Any]) -> Any:
    """Return the tools that the chat template gets; None without tools."""
    return (tools_to_chat_fields(body) if path.endswith("/responses") else body).get("tools") or None


def response_messages(body: Mapping[str, Any]) -> list[Any]:
    """Return about the messages that the chat template gets for a body of /v1/responses."""
    response_input, instructions = body.get("input"), body.get("instructions")
    system = [{"role": "system", "content": instructions}] if instructions else []
    if isinstance(response_input, str):
        return [*system, {"role": "user", "content": response_input}]
    return [*system, *(response_input if isinstance(response_input, list) else ())]


def is_token_ids(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and {*map(type, prompt)} == {int}
        and 0 <= min(prompt) <= max(prompt) < TOKEN_ID_BOUND
    )


def hash_pages(tokens: Sequence[int], page_size: int, root: bytes) -> RoutedPrompt:
    hashes: list[bytes] = []
    extend_page_hashes(hashes, tokens, min(len(tokens), MAX_HASHED_TOKENS) // page_size, page_size, root)
    return RoutedPrompt(hashes, page_size, len(tokens))


# ---------------------------------------------------------------- tokens of a request

# Fields that limit the tokens of an answer; the first one in a body counts.
BOUND_FIELDS = {
    "/v1/completions": ("max_tokens",),
    "/v1/chat/completions": ("max_completion_tokens", "max_tokens"),
    "/v1/responses": ("max_output_tokens", "max_tokens"),
}
DEFAULT_BOUNDS = {"/v1/completions": 16}  # maximum tokens of an answer without such a field
# tokens assumed on other paths: these answers may fill the model's length, which is unknown
UNBOUNDED_TOKENS = 1 << 12
MAX_REQUEST_CHOICES = 128  # maximum completions of a request


def charged_tokens(path: str, fields: Mapping[str, Any], prompt: RoutedPrompt) -> int:
    """Return the tokens that a request is charged in its client's share, at least 1. They are the tokens of
    all its prompts and the maximum tokens of all its answers. `prompt` is its first prompt, already
    hashed."""
    prompts = body_prompts(path, fields)
    prompt_tokens = prompt.tokens + sum(map(estimate_tokens, prompts[1:]))
    names = BOUND_FIELDS.get(path, ())
    if not names:
        return max(1, prompt_tokens)
    bound = next((fields[name] for name in names if fields.get(name) is not None), None)
    choices = len(prompts) * clamp_count(fields.get("n"), 1, MAX_REQUEST_CHOICES)
    return max(
        1,
        prompt_tokens
        + choices * clamp_count(bound, DEFAULT_BOUNDS.get(path, UNBOUNDED_TOKENS), MAX_HASHED_TOKENS),
    )


def clamp_count(value: Any, default: int, maximum: int) -> int:
    """Return the smaller of a body's number and `maximum`; `default` for a value that replicas reject."""
    return min(value, maximum) if type(value) is int and value > 0 else default


def estimate_tokens(prompt: Any) -> int:
    """Return an estimate of a text's tokens, or the number of ids in a list."""
    if isinstance(prompt, str):
        return len(prompt) // BYTES_PER_TOKEN
    return len(prompt) if isinstance(prompt, list) else 0

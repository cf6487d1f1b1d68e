"""Lines of a batch's input, read as tasks or as errors.

A line has one of two formats: that of OpenAI's batch API (`custom_id`, `method`, `url`, `body`), or a plain
object with `prompt` or `messages`, an optional `id`, and sampling parameters under vLLM's names.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from ...text.openai.errors import RequestError, object_of, require
from ...text.openai.tasks import (
    SAMPLING,
    Form,
    Task,
    chat_of,
    prompt_of,
    sampling_of,
    task_of_body,
    with_effect,
)

URLS: dict[str, Form] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
BOM = b"\xef\xbb\xbf"
INTERNAL = "internal_error"  # code of an unexpected exception

ENVELOPE = frozenset({"custom_id", "method", "url", "body"})
GRAMMAR = re.compile(
    rb'"(?:structured_outputs|guided_[a-z]+)"\s*:\s*+(?!null)'
    rb'|"response_format"\s*:\s*+(?!null|\{\s*"type"\s*:\s*"text")'
    rb'|"tool_choice"\s*:\s*+(?!null|"auto"|"none")'
)
PLAIN = frozenset({"id", "model", "prompt", "prompt_token_ids", "messages", "chat_template_kwargs"})


@dataclass(frozen=True)
class RawLine:
    """A line that is not blank."""

    number: int  # in the file, from 1
    index: int  # among lines that are not blank, from 0
    text: bytes | None  # None for a line above the limit
    size: int  # bytes
    digest: int  # 64 bits of BLAKE2b


@dataclass(frozen=True)
class Address:
    """A line's format and id, which its answer repeats."""

    openai: bool
    id: str | int | None = None


class LineReader:
    """Iterator over the lines in the first `size` bytes of a file, which it hashes. It holds at most `limit`
    bytes of a line in memory."""

    def __init__(self, file: BinaryIO, size: int, limit: int):
        self._file, self._left, self._limit = file, size, limit
        self.sha256 = hashlib.sha256()

    def __iter__(self) -> Iterator[RawLine]:
        number = index = 0
        while piece := self._read(self._limit + 1):
            number += 1
            text, size, digest = self._line(piece)
            if number == 1 and text is not None:
                text = text.removeprefix(BOM)
            if text is None or text.strip():
                yield RawLine(number, index, text, size, digest)
                index += 1

    def _read(self, most: int) -> bytes:
        piece = self._file.readline(min(most, self._left))
        self._left -= len(piece)
        self.sha256.update(piece)
        return piece

    def _line(self, piece: bytes) -> tuple[bytes | None, int, int]:
        """Read to a line's end; return its text if it is short enough, its size and its digest."""
        text, size = piece.removesuffix(b"\n"), len(piece)
        digest = hashlib.blake2b(piece, digest_size=8)
        while not piece.endswith(b"\n") and (piece := self._read(1 << 20)):
            digest.update(piece)
            size += len(piece)
        return text if len(text) <= self._limit else None, size, int.from_bytes(digest.digest(), "big")


def asks_for_grammar(text: bytes | None) -> bool:
    """True if a line has a field that constrains its output, with a value that does."""
    return text is not None and GRAMMAR.search(text) is not None


def decode(line: RawLine, limit: int) -> dict[str, Any]:
    """Return a line's JSON object. Raises RequestError."""
    if line.text is None:
        raise RequestError("line_too_long", f"the line has {line.size} bytes, at most {limit} are allowed")
    return object_of(line.text, "line")


def address_of(value: dict[str, Any]) -> Address:
    """Return the address of a line's answer, also for a line that is wrong."""
    openai = not ENVELOPE.isdisjoint(value)
    name = value.get("custom_id" if openai else "id")
    return Address(openai, name if type(name) in (str, int) else None)


def task_of(value: dict[str, Any], defaults: Mapping[str, Any], seed: int) -> Task:
    """Return a line's task, with sampling parameters from `defaults` and `seed` where it gives none.

    Raises RequestError with the field, its value and the allowed values.
    """
    if address_of(value).openai:
        return _openai(value, defaults, seed)
    return _plain(value, defaults, seed)


def _plain(value: dict[str, Any], defaults: Mapping[str, Any], seed: int) -> Task:
    name = value.get("id")
    require(name is None or type(name) in (str, int), "id", name, "a string or an integer")
    prompts = [k for k in ("prompt", "prompt_token_ids", "messages") if value.get(k) is not None]
    if len(prompts) != 1:
        given = " and ".join(prompts) or "none"
        raise RequestError(
            "invalid_line", f"a line needs one of prompt, prompt_token_ids and messages; it has {given}"
        )
    params, model = sampling_of(with_effect(value, SAMPLING, PLAIN), defaults, seed), value.get("model")
    require(model is None or isinstance(model, str), "model", model, "a string")
    if prompts == ["messages"]:
        return replace(chat_of("plain", name, params, value), model=model)
    require("chat_template_kwargs" not in value, "chat_template_kwargs", {}, "only beside messages")
    prompt = value[prompts[0]]
    ids = prompts[0] == "prompt_token_ids"
    require(not (ids and isinstance(prompt, str)), "prompt_token_ids", prompt, "a list of token ids")
    return Task("plain", name, params, prompt=prompt_of(prompts[0], prompt), model=model)


def _openai(value: dict[str, Any], defaults: Mapping[str, Any], seed: int) -> Task:
    for name in sorted(value.keys() - ENVELOPE):
        raise RequestError("invalid_request", f"{name[:60]} is unknown beside {', '.join(sorted(ENVELOPE))}")
    for name in ("custom_id", "method", "url"):
        require(isinstance(value.get(name), str), name, value.get(name), "a string")
    require(value["method"] == "POST", "method", value["method"], '"POST"')
    require(value["url"] in URLS, "url", value["url"], " or ".join(URLS))
    require(isinstance(value.get("body"), dict), "body", value.get("body"), "an object")
    return task_of_body(URLS[value["url"]], value["custom_id"], value["body"], defaults, seed)

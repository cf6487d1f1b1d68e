"""Lines of a batch's input, read as tasks or as errors.

A line has one of two formats. One is OpenAI's batch API (`custom_id`, `method`, `url`, `body`). The other is
a plain object: `prompt` or `messages`, an optional `id`, and sampling parameters under vLLM's names.
"""

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from ...text.openai.errors import RequestError, parse_request_object, require_field
from ...text.openai.tasks import (
    SAMPLING_PARAM_NAMES,
    Task,
    TaskForm,
    drop_neutral_fields,
    parse_chat_task,
    parse_prompt,
    parse_sampling_params,
    parse_task,
    read_cache_salt,
)

FORM_BY_URL: dict[str, TaskForm] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
BOM = b"\xef\xbb\xbf"
INTERNAL_ERROR = "internal_error"  # code of an unexpected exception

ENVELOPE_FIELDS = frozenset({"custom_id", "method", "url", "body"})
GRAMMAR_PATTERN = re.compile(
    rb'"(?:structured_outputs|guided_[a-z]+)"\s*:\s*+(?!null)'
    rb'|"response_format"\s*:\s*+(?!null|\{\s*"type"\s*:\s*"text")'
    rb'|"tool_choice"\s*:\s*+(?!null|"auto"|"none")'
)
PLAIN_FIELDS = frozenset({
    "id", "model", "prompt", "prompt_token_ids", "messages", "chat_template_kwargs", "cache_salt",
})  # fmt: skip


@dataclass(frozen=True)
class RawLine:
    """A line that is not blank."""

    number: int  # in the file, from 1
    index: int  # among lines that are not blank, from 0
    text: bytes | None  # None for a line above the limit
    size: int  # bytes
    digest: int  # 64 bits of BLAKE2b


@dataclass(frozen=True)
class LineIdentity:
    """A line's format and id, which its answer repeats."""

    is_openai: bool
    id: str | int | None = None


class LineReader:
    """Iterator over the lines in the first `size` bytes of a file. It hashes these bytes, and holds at most
    `max_line_bytes` bytes of a line in memory."""

    def __init__(self, file: BinaryIO, size: int, max_line_bytes: int):
        self._file, self._bytes_left, self._max_line_bytes = file, size, max_line_bytes
        self.sha256 = hashlib.sha256()

    def __iter__(self) -> Iterator[RawLine]:
        number = index = 0
        while piece := self._read_piece(self._max_line_bytes + 1):
            number += 1
            text, size, digest = self._read_line(piece)
            if number == 1 and text is not None:
                text = text.removeprefix(BOM)
            if text is None or text.strip():
                yield RawLine(number, index, text, size, digest)
                index += 1

    def _read_piece(self, max_bytes: int) -> bytes:
        piece = self._file.readline(min(max_bytes, self._bytes_left))
        self._bytes_left -= len(piece)
        self.sha256.update(piece)
        return piece

    def _read_line(self, piece: bytes) -> tuple[bytes | None, int, int]:
        """Read to a line's end. Returns its text (None above the limit), its size in bytes and its digest."""
        text, size = piece.removesuffix(b"\n"), len(piece)
        digest = hashlib.blake2b(piece, digest_size=8)
        while not piece.endswith(b"\n") and (piece := self._read_piece(1 << 20)):
            digest.update(piece)
            size += len(piece)
        return (
            text if len(text) <= self._max_line_bytes else None,
            size,
            int.from_bytes(digest.digest(), "big"),
        )


def has_grammar_field(text: bytes | None) -> bool:
    """Return whether a line has a field that constrains its output by a grammar."""
    return text is not None and GRAMMAR_PATTERN.search(text) is not None


def decode_line(line: RawLine, max_bytes: int) -> dict[str, Any]:
    """Return a line's JSON object. Raises RequestError."""
    if line.text is None:
        raise RequestError(
            "line_too_long", f"the line has {line.size} bytes, at most {max_bytes} are allowed"
        )
    return parse_request_object(line.text, "line")


def read_line_identity(value: dict[str, Any]) -> LineIdentity:
    """Return the format and id of a line. Works for wrong lines too, whose errors need them."""
    is_openai = not ENVELOPE_FIELDS.isdisjoint(value)
    name = value.get("custom_id" if is_openai else "id")
    return LineIdentity(is_openai, name if type(name) in (str, int) else None)


def read_line_task(value: dict[str, Any], defaults: Mapping[str, Any], seed: int) -> Task:
    """Return a line's task. Missing sampling parameters come from `defaults`, a missing seed is `seed`.

    Raises RequestError with the field, its value and the allowed values.
    """
    if read_line_identity(value).is_openai:
        return _openai_task(value, defaults, seed)
    return _plain_task(value, defaults, seed)


def _plain_task(value: dict[str, Any], defaults: Mapping[str, Any], seed: int) -> Task:
    name = value.get("id")
    require_field(name is None or type(name) in (str, int), "id", name, "a string or an integer")
    prompts = [k for k in ("prompt", "prompt_token_ids", "messages") if value.get(k) is not None]
    if len(prompts) != 1:
        listed_prompts = " and ".join(prompts) or "none"
        raise RequestError(
            "invalid_line",
            f"a line needs one of prompt, prompt_token_ids and messages; it has {listed_prompts}",
        )
    fields = drop_neutral_fields(value, SAMPLING_PARAM_NAMES, PLAIN_FIELDS)
    params, model = parse_sampling_params(fields, defaults, seed), value.get("model")
    require_field(model is None or isinstance(model, str), "model", model, "a string")
    salt = read_cache_salt(value)
    if prompts == ["messages"]:
        return replace(parse_chat_task("plain", name, params, value), model=model, cache_salt=salt)
    require_field("chat_template_kwargs" not in value, "chat_template_kwargs", {}, "only beside messages")
    prompt = value[prompts[0]]
    is_ids = prompts[0] == "prompt_token_ids"
    require_field(not (is_ids and isinstance(prompt, str)), "prompt_token_ids", prompt, "a list of token ids")
    return Task("plain", name, params, prompt=parse_prompt(prompts[0], prompt), model=model, cache_salt=salt)


def _openai_task(value: dict[str, Any], defaults: Mapping[str, Any], seed: int) -> Task:
    for name in sorted(value.keys() - ENVELOPE_FIELDS):
        raise RequestError(
            "invalid_request", f"{name[:60]} is unknown beside {', '.join(sorted(ENVELOPE_FIELDS))}"
        )
    for name in ("custom_id", "method", "url"):
        require_field(isinstance(value.get(name), str), name, value.get(name), "a string")
    require_field(value["method"] == "POST", "method", value["method"], '"POST"')
    require_field(value["url"] in FORM_BY_URL, "url", value["url"], " or ".join(FORM_BY_URL))
    require_field(isinstance(value.get("body"), dict), "body", value.get("body"), "an object")
    return parse_task(FORM_BY_URL[value["url"]], value["custom_id"], value["body"], defaults, seed)

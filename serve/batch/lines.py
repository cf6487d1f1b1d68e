"""Lines of a batch: bytes become tasks, or errors that say what is wrong with the line.

Two formats: OpenAI's batch API (`custom_id`, `method`, `url`, `body`) and plain objects with `prompt` or
`messages`, an optional `id`, and sampling parameters beside them under vLLM's names.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, BinaryIO, Literal

import msgspec

from ...refusals import among, nearest
from ...sampling.params import SamplingParams
from ..text.chat import ChatTemplateError, check_messages
from .neutral import HARMLESS, NEUTRAL

Form = Literal["plain", "completion", "chat"]
URLS: dict[str, Form] = {"/v1/completions": "completion", "/v1/chat/completions": "chat"}
MAX_CHOICES = 128  # completions of one line: OpenAI's limit
MAX_DEPTH = 100  # levels of a line's JSON, so that the stack that happens to be left decides nothing
BOM = b"\xef\xbb\xbf"
INTERNAL = "internal_error"  # the code of what nobody foresaw

SAMPLING = frozenset(f.name for f in dataclasses.fields(SamplingParams) if f.metadata.get("flag", True))
ENVELOPE = frozenset({"custom_id", "method", "url", "body"})
PLAIN = frozenset({"id", "model", "prompt", "prompt_token_ids", "messages", "chat_template_kwargs"})
CHAT = frozenset(
    {"model", "messages", "max_completion_tokens", "logprobs", "top_logprobs", "chat_template_kwargs"}
)
COMPLETION = frozenset({"model", "prompt"})
# OpenAI's answers have no place for what these ask for.
PLAIN_ONLY = frozenset({"prompt_logprobs", "detokenize"})
BODY = SAMPLING - PLAIN_ONLY
# Variables of a chat template that are not the line's to set.
TEMPLATE_OWN = frozenset(
    {"chat_template", "template", "tokenizer", "messages", "tools", "bos_token", "eos_token"}
    | {"add_generation_prompt", "now"}
)


class LineError(ValueError):
    """What is wrong with a line: a code for programs and a sentence for people."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class RawLine:
    """A line that is not blank: its number in the file (from 1) and its index among such lines (from 0).

    `text` is None for a line above the limit, of which only `size` and `digest` (64 bits of BLAKE2b) are
    known.
    """

    number: int
    index: int
    text: bytes | None
    size: int
    digest: int


@dataclass(frozen=True)
class Address:
    """To whom a line's answer goes: the format it was asked in, and its id."""

    openai: bool
    id: str | int | None = None


@dataclass(frozen=True)
class Task:
    """A line that asks for something sensible: text or token ids to continue, or messages to reply to.

    `model` is the name that the line gives the model, if it names one.
    """

    form: Form
    id: str | int | None
    params: SamplingParams
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    template_variables: dict[str, Any] = field(default_factory=dict)
    model: str | None = None


class LineReader:
    """The first `size` bytes of a file by lines, hashed on the way; memory is bounded by `limit`, whatever a
    line's length."""

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
        """A line's text, if it is short enough, its size and its digest; reads on to its end."""
        text, size = piece.removesuffix(b"\n"), len(piece)
        digest = hashlib.blake2b(piece, digest_size=8)
        while not piece.endswith(b"\n") and (piece := self._read(1 << 20)):
            digest.update(piece)
            size += len(piece)
        return text if len(text) <= self._limit else None, size, int.from_bytes(digest.digest(), "big")


def decode(line: RawLine, limit: int) -> dict[str, Any]:
    """A line's JSON object. Raises LineError."""
    if line.text is None:
        raise LineError("line_too_long", f"the line has {line.size} bytes, at most {limit} are allowed")
    try:
        value = msgspec.json.decode(line.text.decode())
    except UnicodeDecodeError as error:
        byte = line.text[error.start]
        raise LineError(
            "invalid_utf8", f"byte {error.start} of the line, 0x{byte:02x}, is not UTF-8"
        ) from None
    except msgspec.DecodeError as error:
        raise LineError("invalid_json", f"the line is not JSON: {error}") from None
    except RecursionError:
        raise too_deep() from None
    if line.text.count(b"[") + line.text.count(b"{") > MAX_DEPTH and depth(value) > MAX_DEPTH:
        raise too_deep()
    if not isinstance(value, dict):
        raise LineError("invalid_line", f"the line must be a JSON object, not {as_json(value)}")
    return value


def too_deep() -> LineError:
    return LineError(
        "invalid_json", f"the line's JSON is nested too deeply: at most {MAX_DEPTH} levels are allowed"
    )


def depth(value: Any) -> int:
    """Levels of lists and objects, counted without recursion."""
    level, found = [value], -1
    while level:
        inner = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, (dict, list))]
        level, found = [x for values in inner for x in values], found + 1
    return found


def address_of(value: dict[str, Any]) -> Address:
    """To whom to answer, if only that anything is wrong."""
    openai = not ENVELOPE.isdisjoint(value)
    name = value.get("custom_id" if openai else "id")
    return Address(openai, name if type(name) in (str, int) else None)


def task_of(value: dict[str, Any], defaults: Mapping[str, Any], seed: int) -> Task:
    """What a line asks for. `defaults` are sampling parameters of lines that do not give them, `seed` theirs
    likewise.

    Raises LineError naming the field, its value and what is allowed.
    """
    if address_of(value).openai:
        return _openai(value, defaults, seed)
    return _plain(value, defaults, seed)


def _plain(value: dict[str, Any], defaults: Mapping[str, Any], seed: int) -> Task:
    name = value.get("id")
    _require(name is None or type(name) in (str, int), "id", name, "a string or an integer")
    asked = [k for k in ("prompt", "prompt_token_ids", "messages") if value.get(k) is not None]
    if len(asked) != 1:
        given = " and ".join(asked) or "none"
        raise LineError(
            "invalid_line", f"a line needs one of prompt, prompt_token_ids and messages; it has {given}"
        )
    params = _params(_asking(value, SAMPLING, PLAIN), defaults, seed)
    if asked == ["messages"]:
        return _chat("plain", name, params, value)
    _require("chat_template_kwargs" not in value, "chat_template_kwargs", {}, "only beside messages")
    prompt = value[asked[0]]
    ids = asked[0] == "prompt_token_ids"
    _require(not (ids and isinstance(prompt, str)), "prompt_token_ids", prompt, "a list of token ids")
    return Task("plain", name, params, prompt=_prompt(asked[0], prompt))


def _openai(value: dict[str, Any], defaults: Mapping[str, Any], seed: int) -> Task:
    for name in sorted(value.keys() - ENVELOPE):
        raise LineError("invalid_request", f"{name[:60]} is unknown beside {', '.join(sorted(ENVELOPE))}")
    for name in ("custom_id", "method", "url"):
        _require(isinstance(value.get(name), str), name, value.get(name), "a string")
    _require(value["method"] == "POST", "method", value["method"], '"POST"')
    _require(value["url"] in URLS, "url", value["url"], " or ".join(URLS))
    _require(isinstance(value.get("body"), dict), "body", value.get("body"), "an object")
    body = {k: v for k, v in value["body"].items() if v is not None}
    form, name, model = URLS[value["url"]], value["custom_id"], body.get("model")
    _require(model is None or isinstance(model, str), "model", model, "a string")
    if form == "chat":
        params = _params(_chat_fields(body), {"max_tokens": None, **defaults}, seed)
        return replace(_chat("chat", name, params, body), model=model)
    _require("prompt" in body, "prompt", None, "a string or a list of token ids")
    params = _params(_body_fields(body, COMPLETION), {"max_tokens": 16, **defaults}, seed)
    return Task("completion", name, params, prompt=_prompt("prompt", body["prompt"]), model=model)


def _asking(given: dict[str, Any], known: frozenset[str], others: frozenset[str]) -> dict[str, Any]:
    """The sampling parameters among the `known` names, and names that nobody knows; what asks for nothing is
    left out.

    Raises LineError for a field that is understood only as far as it asks for nothing, but asks for
    something.
    """
    fields = {}
    for name, value in given.items():
        if name in NEUTRAL and name not in known | others:
            allowed = " or ".join(json.dumps(x) for x in NEUTRAL[name])
            _require(among(value, NEUTRAL[name]), name, value, f"only {allowed} is supported")
        elif name not in HARMLESS | others:
            fields[name] = value
    return fields


def _body_fields(body: dict[str, Any], others: frozenset[str]) -> dict[str, Any]:
    """The sampling parameters of an OpenAI body; whatever else it holds asks for nothing, or is refused."""
    fields = _asking(body, BODY, others)
    for name in (name for name in fields if name not in BODY):
        near = nearest(name, BODY | others)
        hint = f"; did you mean {near}?" if near else ""
        raise LineError("invalid_request", f"{name[:60]} is not supported in a body{hint}")
    return fields


def _chat_fields(body: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters under the names and in the meaning that they have for chat."""
    fields = _body_fields(body, CHAT)
    if "max_completion_tokens" in body:
        fields["max_tokens"] = body["max_completion_tokens"]
    wanted, top = body.get("logprobs", False), body.get("top_logprobs", 0)
    _require(isinstance(wanted, bool), "logprobs", wanted, "true or false")
    _require(wanted or among(top, (0,)), "top_logprobs", top, "only with logprobs true")
    return fields | ({"logprobs": top} if wanted else {})


def _params(fields: dict[str, Any], defaults: Mapping[str, Any], seed: int) -> SamplingParams:
    merged = {**defaults, **fields}
    if merged.get("seed") is None:
        merged["seed"] = seed
    try:
        params = SamplingParams.from_dict(merged)
    except (TypeError, ValueError) as error:
        raise LineError("invalid_request", str(error)[:500]) from None
    _require(params.n <= MAX_CHOICES, "n", params.n, f"1 to {MAX_CHOICES}")
    return params


def _chat(form: Form, name: str | int | None, params: SamplingParams, fields: dict[str, Any]) -> Task:
    variables = fields.get("chat_template_kwargs") or {}
    _require(isinstance(variables, dict), "chat_template_kwargs", variables, "an object")
    taken = sorted(TEMPLATE_OWN.intersection(variables))
    _require(not taken, "chat_template_kwargs", taken, "other variables of the template")
    try:
        messages = check_messages(fields.get("messages"))
    except ChatTemplateError as error:
        raise LineError("invalid_request", str(error)) from None
    return Task(form, name, params, messages=messages, template_variables=variables)


def _prompt(name: str, value: Any) -> str | list[int]:
    """A string or token ids; OpenAI's clients also send either in a list of one."""
    if isinstance(value, list) and value and isinstance(value[0], (str, list)):
        _require(len(value) == 1, name, value, "one prompt a line; give each its own")
        value = value[0]
    ids = isinstance(value, list) and all(type(i) is int for i in value)
    _require(ids or isinstance(value, str), name, value, "a string or a list of token ids")
    return value


def _require(ok: bool, name: str, value: Any, allowed: str) -> None:
    if not ok:
        raise LineError("invalid_request", f"{name}={as_json(value)} is not allowed: {allowed}")


def encodable(text: str) -> str:
    """Text without lone surrogates, which JSON does not have."""
    return text.encode(errors="backslashreplace").decode()


def as_json(value: Any) -> str:
    """A value for a message, cut short."""
    if isinstance(value, (list, dict)):
        kind = "a list" if isinstance(value, list) else "an object"
        return f"{kind} of {len(value)}"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."

"""Errors of requests, and the JSON objects that they come in. Nothing here imports jax: a router needs it."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from ....refusals import RepeatedKey, reject_repeated_keys

MAX_DEPTH = 100  # levels of JSON: a fixed bound, not the free stack, decides
STRUCTURAL_CHARS = b",", b":", b"[", b"{"  # JSON has one for each value, but the first of a list
PIECE_BYTES = 1 << 16  # bytes that are searched while no other thread runs


class RequestError(ValueError):
    """An error in a request: a code for programs, a message, and the name of the field."""

    def __init__(self, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.code, self.param = code, param


def require_field(is_allowed: bool, name: str, value: Any, allowed: str) -> None:
    if not is_allowed:
        raise RequestError(
            "invalid_request", f"{name}={describe_value(value)} is not allowed: {allowed}", name
        )


def is_flag_set(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a field that is true or false. Raises RequestError for another value."""
    value = default if fields.get(name) is None else fields[name]
    require_field(isinstance(value, bool), name, value, "true or false")
    return value


def escape_surrogates(text: str) -> str:
    """Return a text without lone surrogates, which JSON cannot hold."""
    return text.encode(errors="backslashreplace").decode()


def describe_value(value: Any) -> str:
    """Return a value for a message, cut short."""
    if isinstance(value, (list, dict)):
        kind = "a list" if isinstance(value, list) else "an object"
        return f"{kind} of {len(value)}"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def parse_request_object(text: bytes, what: str, max_structural_chars: int | None = None) -> dict[str, Any]:
    """Parse a JSON object of at most `max_structural_chars` STRUCTURAL_CHARS. Raises RequestError; `what`
    names it there."""
    if (
        max_structural_chars is not None
        and len(text) > max_structural_chars
        and count_structural_chars(text, max_structural_chars) > max_structural_chars
    ):
        allowed = f"at most {max_structural_chars} commas, colons and opening brackets are allowed"
        raise RequestError("invalid_json", f"the {what}'s JSON has too many values: {allowed}")
    try:
        value = msgspec.json.decode(text.decode())
    except UnicodeDecodeError as error:
        byte = text[error.start]
        raise RequestError(
            "invalid_utf8", f"byte {error.start} of the {what}, 0x{byte:02x}, is not UTF-8"
        ) from None
    except msgspec.DecodeError as error:
        raise RequestError("invalid_json", f"the {what} is not JSON: {error}") from None
    except RecursionError:
        raise depth_error(what) from None
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and count_json_levels(value) > MAX_DEPTH:
        raise depth_error(what)
    try:  # msgspec keeps the last value of a repeated key
        json.loads(text, object_pairs_hook=reject_repeated_keys, parse_int=len, parse_float=len)
    except RepeatedKey as error:
        raise RequestError("repeated_key", f"{error} of the {what}", error.key[:60]) from None
    if not isinstance(value, dict):
        raise RequestError(
            f"invalid_{what}", f"the {what} must be a JSON object, not {describe_value(value)}"
        )
    return value


def count_structural_chars(text: bytes, max_chars: int) -> int:
    """Count the STRUCTURAL_CHARS outside of strings, at least up to `max_chars`. A parser would make objects
    of them all before another thread runs."""
    num_chars, is_string, rest = 0, False, b""
    for start in range(0, len(text), PIECE_BYTES):
        piece = rest + text[start : start + PIECE_BYTES]
        end = len(piece) - (len(piece) - len(piece.rstrip(b"\\"))) % 2  # an escape stays whole
        piece, rest = piece[:end], piece[end:]
        parts = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[is_string::2])
        num_chars += sum(map(outside.count, STRUCTURAL_CHARS))
        is_string ^= len(parts) % 2 == 0
        if num_chars > max_chars:
            break
    return num_chars


def depth_error(what: str) -> RequestError:
    return RequestError(
        "invalid_json", f"the {what}'s JSON is nested too deeply: at most {MAX_DEPTH} levels are allowed"
    )


def count_json_levels(value: Any) -> int:
    """Count levels of lists and objects, without recursion."""
    level, num_levels = [value], -1
    while level:
        inner = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, (dict, list))]
        level, num_levels = [x for values in inner for x in values], num_levels + 1
    return num_levels

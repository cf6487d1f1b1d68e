"""Errors of requests, and the JSON objects that they come in. Nothing here imports jax: a router needs it."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from ....refusals import RepeatedKey, unique

MAX_DEPTH = 100  # levels of JSON: a fixed bound, not the free stack, decides


class RequestError(ValueError):
    """An error in a request: a code for programs, a message, and the name of the field."""

    def __init__(self, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.code, self.param = code, param


def require(ok: bool, name: str, value: Any, allowed: str) -> None:
    if not ok:
        raise RequestError("invalid_request", f"{name}={as_json(value)} is not allowed: {allowed}", name)


def flag(fields: Mapping[str, Any], name: str, default: bool) -> bool:
    """Return a field that is true or false. Raises RequestError for another value."""
    value = default if fields.get(name) is None else fields[name]
    require(isinstance(value, bool), name, value, "true or false")
    return value


def encodable(text: str) -> str:
    """Return a text without lone surrogates, which JSON cannot hold."""
    return text.encode(errors="backslashreplace").decode()


def as_json(value: Any) -> str:
    """Return a value for a message, cut short."""
    if isinstance(value, (list, dict)):
        kind = "a list" if isinstance(value, list) else "an object"
        return f"{kind} of {len(value)}"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."


def object_of(text: bytes, what: str) -> dict[str, Any]:
    """Parse a JSON object; `what` names it in errors. Raises RequestError."""
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
        raise too_deep(what) from None
    if text.count(b"[") + text.count(b"{") > MAX_DEPTH and depth(value) > MAX_DEPTH:
        raise too_deep(what)
    try:  # msgspec keeps the last value of a repeated key
        json.loads(text, object_pairs_hook=unique, parse_int=len, parse_float=len)
    except RepeatedKey as error:
        raise RequestError("repeated_key", f"{error} of the {what}", error.key[:60]) from None
    if not isinstance(value, dict):
        raise RequestError(f"invalid_{what}", f"the {what} must be a JSON object, not {as_json(value)}")
    return value


def too_deep(what: str) -> RequestError:
    return RequestError(
        "invalid_json", f"the {what}'s JSON is nested too deeply: at most {MAX_DEPTH} levels are allowed"
    )


def depth(value: Any) -> int:
    """Count levels of lists and objects, without recursion."""
    level, found = [value], -1
    while level:
        inner = [x.values() if isinstance(x, dict) else x for x in level if isinstance(x, (dict, list))]
        level, found = [x for values in inner for x in values], found + 1
    return found

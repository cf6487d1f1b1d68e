"""What is wrong with a request, in words. Nothing here imports jax: a router says it too."""

import json
from typing import Any


class RequestError(ValueError):
    """What is wrong with a request: a code for programs, a sentence for people, and the field."""

    def __init__(self, code: str, message: str, param: str | None = None):
        super().__init__(message)
        self.code, self.param = code, param


def require(ok: bool, name: str, value: Any, allowed: str) -> None:
    if not ok:
        raise RequestError("invalid_request", f"{name}={as_json(value)} is not allowed: {allowed}", name)


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

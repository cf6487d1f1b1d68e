"""Keys that clients have to send."""

import hmac
from collections.abc import Collection
from hashlib import sha256
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..service.errors import HttpError


def keys_in(path: str) -> list[str]:
    """The keys in a file, one on each line. Raises OSError, and ValueError where there is none, or no
    text."""
    try:
        text = Path(path).read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"api_key_file {path} is not allowed: {error}") from None
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"api_key_file {path} is not allowed: it has no key")
    return keys


class Keys:
    """Answers 401 to whoever has no key, but on `open` paths; a request's client is the hash of its key.
    Comparing takes the same time for all keys."""

    def __init__(self, app: ASGIApp, keys: list[str], open: Collection[str]):
        self.app, self._open, self._hashes = app, open, [digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._hashes and scope["path"] not in self._open:
            scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
            found = digest(key.strip().encode("latin-1") if scheme.lower() == "bearer" else b"")
            if not sum(hmac.compare_digest(found, known) for known in self._hashes):
                error = HttpError(401, "the API key is missing or unknown", "invalid_api_key")
                return await error.response()(scope, receive, send)
            scope["client_name"] = found.hex()
        await self.app(scope, receive, send)


def digest(key: bytes) -> bytes:
    return sha256(key).digest()

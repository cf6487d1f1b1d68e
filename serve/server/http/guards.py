"""Checks before a request reaches a route: host name, origin of the page that sends it, and API key."""

import hmac
import re
from collections.abc import Callable, Collection
from hashlib import sha256
from ipaddress import IPv6Address, ip_address
from pathlib import Path

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ...options.server import ServerOptions
from ..service.errors import HttpError

ANY = "*"
HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")
LOCAL = "localhost"
EXPOSED = ["x-request-id", "retry-after"]  # headers that pages of allowed origins may read


class Guard:
    """Answers an HTTP request with the error that `check` returns for it, if any."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], HttpError | None]):
        self.app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._check(scope)) is not None:
            return await error.response()(scope, receive, send)
        await self.app(scope, receive, send)


def guards(options: ServerOptions) -> list[Middleware]:
    """Middleware that rejects requests of browser pages which may not send them, before all other checks."""
    hosts = Middleware(Guard, check=Hosts(options.allowed_hosts, options.host))
    return [hosts, *origins(options.allowed_origins or ())]


# ---------------------------------------------------------------- API keys


def keys_in(path: str) -> list[str]:
    """Read API keys, one a line. Raises OSError, and ValueError for a file without keys or no text."""
    try:
        text = Path(path).read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"api_key_file {path} is not allowed: {error}") from None
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"api_key_file {path} is not allowed: it has no key")
    return keys


class ApiKeys:
    """Rejects with 401 requests without a known key, except on `open` paths. The hash of the key becomes the
    request's client name. All keys are compared in the same time."""

    def __init__(self, keys: list[str], open: Collection[str]):
        self._open, self._hashes = open, [digest(key.encode()) for key in keys]

    def __call__(self, scope: Scope) -> HttpError | None:
        if not self._hashes or scope["path"] in self._open:
            return None
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        found = digest(key.strip().encode("latin-1") if scheme.lower() == "bearer" else b"")
        if not sum(hmac.compare_digest(found, known) for known in self._hashes):
            return HttpError(401, "the API key is missing or unknown", "invalid_api_key")
        scope["client_name"] = found.hex()
        return None


def digest(key: bytes) -> bytes:
    return sha256(key).digest()


# ---------------------------------------------------------------- origins


def origins(allowed: Collection[str]) -> list[Middleware]:
    """Middleware that lets pages of the `allowed` origins send requests and read the answers (CORS), and
    pages of other origins do neither."""
    own = [Middleware(Guard, check=Origins(allowed))]
    if not allowed:
        return own
    shared = Middleware(
        CORSMiddleware,
        allow_origins=list(allowed),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=EXPOSED,
    )
    return [shared, *own]


class Origins:
    """Rejects with 403 a POST from a page of another origin: a browser sends it, though the page never sees
    the answer. Browsers name the origin in `Sec-Fetch-Site`, or over plain http in `Origin` alone, as Go's
    CrossOriginProtection reads them; other clients send neither."""

    def __init__(self, allowed: Collection[str]):
        self._allowed = allowed

    def __call__(self, scope: Scope) -> HttpError | None:
        headers = Headers(scope=scope)
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if scope["method"] != "POST" or ANY in self._allowed or origin in self._allowed:
            return None
        if site is not None:
            is_foreign = site not in ("same-origin", "none")
        else:
            is_foreign = origin is not None and origin.partition("://")[2] != headers.get("host")
        reason = "pages of other origins may not ask; --allowed-origins names those that may"
        return HttpError(403, reason, "origin") if is_foreign else None


# ---------------------------------------------------------------- host names


class Hosts:
    """Rejects with 403 requests whose `Host` is no address, no `localhost` and no `allowed` name. Without it,
    a page of a name that its owner points at this machine (DNS rebinding) is of the same origin as the
    server. Checked are requests at a loopback address and, if names are allowed, all; a request without the
    header is from no browser."""

    def __init__(self, allowed: Collection[str] | None, own: str):
        self._names = {plain(name) for name in (allowed or ())}
        self._checks_all, self._own = allowed is not None, plain(own)

    def __call__(self, scope: Scope) -> HttpError | None:
        if not (self._checks_all or is_loopback(scope)):
            return None
        name = name_of(Headers(scope=scope).get("host", ""))
        if self._is_allowed(name):
            return None
        reason = f"the server is not asked as {name[:100]!r}; --allowed-hosts names what it is asked as"
        return HttpError(403, reason, "host")

    def _is_allowed(self, name: str) -> bool:
        known = name in ("", LOCAL, self._own) or name.endswith("." + LOCAL) or is_address(name)
        parents = (ANY + name[i:] for i, letter in enumerate(name) if letter == ".")
        return known or ANY in self._names or name in self._names or not self._names.isdisjoint(parents)


def name_of(host: str) -> str:
    """Return the name in a `Host` header, without its port; all of a malformed header."""
    found = HOST.fullmatch(host)
    return plain(found[1] if found else host)


def plain(name: str) -> str:
    return name.strip().lower().removesuffix(".")


def is_address(name: str) -> bool:
    inner = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    try:
        return bool(ip_address(inner))
    except ValueError:
        return False


def is_loopback(scope: Scope) -> bool:
    try:
        found = ip_address((scope.get("server") or ("",))[0].partition("%")[0])
    except ValueError:  # a Unix socket
        return False
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback

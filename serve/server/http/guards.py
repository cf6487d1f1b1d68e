"""Checks before a request reaches a route: host name, origin of the sending page, and API key."""

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

ANY_NAME = "*"
HOST_PATTERN = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")
LOCALHOST = "localhost"
EXPOSED_HEADERS = ["x-request-id", "retry-after"]  # headers that pages of allowed origins may read


class Guard:
    """Middleware that answers an HTTP request with the error that `check` returns for it, if any."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], HttpError | None]):
        self.app, self._check = app, check

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._check(scope)) is not None:
            return await error.to_response()(scope, receive, send)
        await self.app(scope, receive, send)


def guard_middleware(options: ServerOptions) -> list[Middleware]:
    """Return the middleware that rejects forbidden requests of browser pages. It precedes all other
    checks."""
    hosts = Middleware(Guard, check=HostCheck(options.allowed_hosts, options.host))
    return [hosts, *origin_middleware(options.allowed_origins or ())]


# ---------------------------------------------------------------- API keys


def read_api_keys(path: str) -> list[str]:
    """Read API keys from a file, one per line. Raises OSError, and ValueError for a file without keys or with
    bytes that are no text."""
    try:
        text = Path(path).read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"api_key_file {path} is not allowed: {error}") from None
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise ValueError(f"api_key_file {path} is not allowed: it has no key")
    return keys


class ApiKeyCheck:
    """Rejects with 401 requests without a known key, except on `open_paths`. The hash of the key
    becomes the request's client name. Keys are compared in constant time."""

    def __init__(self, keys: list[str], open_paths: Collection[str]):
        self._open_paths, self._hashes = open_paths, [hash_api_key(key.encode()) for key in keys]

    def __call__(self, scope: Scope) -> HttpError | None:
        if not self._hashes or scope["path"] in self._open_paths:
            return None
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        key_hash = hash_api_key(key.strip().encode("latin-1") if scheme.lower() == "bearer" else b"")
        if not sum(hmac.compare_digest(key_hash, known) for known in self._hashes):
            return HttpError(401, "the API key is missing or unknown", "invalid_api_key")
        scope["client_name"] = key_hash.hex()
        return None


def hash_api_key(key: bytes) -> bytes:
    return sha256(key).digest()


# ---------------------------------------------------------------- origins


def origin_middleware(allowed: Collection[str]) -> list[Middleware]:
    """Return the middleware for origins (CORS). Pages of `allowed` origins may send requests and read
    answers; pages of other origins may do neither."""
    guard = [Middleware(Guard, check=OriginCheck(allowed))]
    if not allowed:
        return guard
    cors = Middleware(
        CORSMiddleware,
        allow_origins=list(allowed),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=EXPOSED_HEADERS,
    )
    return [cors, *guard]


class OriginCheck:
    """Rejects with 403 a POST from a page of another origin. A browser would send it, although the page never
    sees the answer. Browsers name the origin in `Sec-Fetch-Site`, or over plain http in `Origin` alone. Go's
    CrossOriginProtection reads them the same way. Other clients send neither."""

    def __init__(self, allowed: Collection[str]):
        self._allowed = allowed

    def __call__(self, scope: Scope) -> HttpError | None:
        headers = Headers(scope=scope)
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if scope["method"] != "POST" or ANY_NAME in self._allowed or origin in self._allowed:
            return None
        if site is not None:
            is_foreign = site not in ("same-origin", "none")
        else:
            is_foreign = origin is not None and origin.partition("://")[2] != headers.get("host")
        reason = "pages of other origins may not ask; --allowed-origins names those that may"
        return HttpError(403, reason, "origin") if is_foreign else None


# ---------------------------------------------------------------- host names


class HostCheck:
    """Rejects with 403 requests whose `HostTimes` is no address, no `localhost` and no `allowed` name.

    This stops DNS rebinding: the owner of a name points it at this machine, so that a page of that name has
    the server's origin. If `allowed` is None, only requests at a loopback address are checked. A request
    without the header passes: no browser sent it.
    """

    def __init__(self, allowed: Collection[str] | None, host: str):
        self._names = {normalize_host(name) for name in (allowed or ())}
        self._checks_all, self._host = allowed is not None, normalize_host(host)

    def __call__(self, scope: Scope) -> HttpError | None:
        if not (self._checks_all or is_loopback_scope(scope)):
            return None
        name = host_name(Headers(scope=scope).get("host", ""))
        if self._is_allowed(name):
            return None
        reason = f"the server is not asked as {name[:100]!r}; --allowed-hosts names what it is asked as"
        return HttpError(403, reason, "host")

    def _is_allowed(self, name: str) -> bool:
        known = name in ("", LOCALHOST, self._host) or name.endswith("." + LOCALHOST) or is_ip_address(name)
        parents = (ANY_NAME + name[i:] for i, letter in enumerate(name) if letter == ".")
        return known or ANY_NAME in self._names or name in self._names or not self._names.isdisjoint(parents)


def host_name(host: str) -> str:
    """Return the name in a `HostTimes` header, without the port. A malformed header is returned as a
    whole."""
    match = HOST_PATTERN.fullmatch(host)
    return normalize_host(match[1] if match else host)


def normalize_host(name: str) -> str:
    return name.strip().lower().removesuffix(".")


def is_ip_address(name: str) -> bool:
    inner = name[1:-1] if name.startswith("[") and name.endswith("]") else name
    try:
        return bool(ip_address(inner))
    except ValueError:
        return False


def is_loopback_scope(scope: Scope) -> bool:
    try:
        address = ip_address((scope.get("server") or ("",))[0].partition("%")[0])
    except ValueError:  # a Unix socket
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback

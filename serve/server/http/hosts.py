"""Names under which a server is asked: a page of a name that its owner points at this machine (DNS rebinding)
is of the same origin as the server, for a browser."""

import re
from collections.abc import Collection
from ipaddress import IPv6Address, ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ..service.errors import HttpError

ANY = "*"
HOST = re.compile(r"(\[[^\]]*\]|[^:]*)(?::\d*)?")
LOCAL = "localhost"


class Hosts:
    """Answers 403 to requests whose `Host` is no address, no `localhost` and no `allowed` name: of those that
    come by a loopback address, and where names are allowed of all. A request without the header is of no
    browser."""

    def __init__(self, app: ASGIApp, allowed: Collection[str] | None, own: str):
        self.app, self._names = app, {plain(name) for name in (allowed or ())}
        self._checks_all, self._own = allowed is not None, plain(own)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (self._checks_all or is_loopback(scope)):
            name = name_of(Headers(scope=scope).get("host", ""))
            if not self._is_allowed(name):
                told = f"the server is not asked as {name[:100]!r}; --allowed-hosts names what it is asked as"
                return await HttpError(403, told, "host").response()(scope, receive, send)
        await self.app(scope, receive, send)

    def _is_allowed(self, name: str) -> bool:
        known = name in ("", LOCAL, self._own) or name.endswith("." + LOCAL) or is_address(name)
        parents = (ANY + name[i:] for i, letter in enumerate(name) if letter == ".")
        return known or ANY in self._names or name in self._names or not self._names.isdisjoint(parents)


def name_of(host: str) -> str:
    """The name in a `Host` header, without a port; all of what is none."""
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
    """Whether a request has come by an address that only this machine reaches."""
    try:
        found = ip_address((scope.get("server") or ("",))[0].partition("%")[0])
    except ValueError:  # no socket of the internet
        return False
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return (mapped or found).is_loopback

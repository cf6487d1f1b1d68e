"""Browsers that ask from pages of other origins."""

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from ...options.server import ServerOptions
from ..service.errors import HttpError
from .hosts import Hosts

ALL = "*"
TOLD = ["x-request-id", "retry-after"]  # headers that such a page may read


def guards(options: ServerOptions) -> list[Middleware]:
    """What keeps pages out that a browser must not ask from, before anything else is looked at."""
    hosts = Middleware(Hosts, allowed=options.allowed_hosts, own=options.host)
    return [hosts, *origins(options.allowed_origins or ())]


def origins(allowed: Collection[str]) -> list[Middleware]:
    """Pages of the `allowed` origins may ask, and read the answers (CORS); others may do neither."""
    own = [Middleware(Origins, allowed=allowed)]
    if not allowed:
        return own
    shared = Middleware(
        CORSMiddleware,
        allow_origins=list(allowed),
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=TOLD,
    )
    return [shared, *own]


class Origins:
    """Answers 403 to what pages of other origins POST: a browser sends it, though the page never sees the
    answer. It says where a page is from in `Sec-GetPage-Site`, or over plain http in `Origin` alone, as Go's
    CrossOriginProtection has it; other clients send neither."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]):
        self.app, self._allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and self._is_foreign(Headers(scope=scope)):
            error = HttpError(
                403, "pages of other origins may not ask; --allowed-origins names those that may", "origin"
            )
            return await error.response()(scope, receive, send)
        await self.app(scope, receive, send)

    def _is_foreign(self, headers: Headers) -> bool:
        site, origin = headers.get("sec-fetch-site"), headers.get("origin")
        if ALL in self._allowed or origin in self._allowed:
            return False
        if site is not None:
            return site not in ("same-origin", "none")
        return origin is not None and origin.partition("://")[2] != headers.get("host")

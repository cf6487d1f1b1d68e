"""The life of a server or a router, from a bound address to the last stream. Nothing here imports jax."""

import asyncio
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Collection, Coroutine, Sequence
from functools import partial
from ipaddress import ip_address
from types import FrameType
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from ...host.streams import tell
from ...options.server import ServerOptions
from ..service.errors import HANDLERS
from .guards import ApiKeys, Guard, guards
from .http_limits import LimitedHttpProtocol

CLOSING = 3  # seconds until connections are closed after the last request


def run(work: Coroutine[Any, Any, int]) -> int:
    """Run `work` in an event loop of its own: uvloop's, where it exists."""
    if sys.platform == "win32":
        return asyncio.run(work)
    import uvloop

    return uvloop.run(work)


def guarded_app(
    routes: Sequence[Route],
    options: ServerOptions,
    keys: list[str],
    open: Collection[str],
    inner: Sequence[Middleware] = (),
) -> Starlette:
    """Return an app of routes behind the checks of host, origin and, except on `open` paths, key; the `inner`
    middleware runs after these."""
    middleware = [*guards(options), Middleware(Guard, check=ApiKeys(keys, open)), *inner]
    return Starlette(routes=routes, middleware=middleware, exception_handlers=HANDLERS)


async def serve_app(
    app: Starlette, options: ServerOptions, own: socket.socket, has_keys: bool,
    place: str, drain: Callable[[], object], ended: asyncio.Event,
) -> None:  # fmt: skip
    """Serve an app at the bound socket `own` until `ended` is set. A first signal calls `drain`, a second one
    ends the process. `place` names in the log what is served, and where."""
    protocol: Any = partial(LimitedHttpProtocol, seconds=options.receive_timeout)
    config = uvicorn.Config(
        app, http=protocol, ws="none", loop="none", lifespan="off",
        log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=CLOSING,
        ssl_certfile=options.ssl_certfile, ssl_keyfile=options.ssl_keyfile,
    )  # fmt: skip
    server = Server(config, partial(asyncio.get_running_loop().call_soon_threadsafe, drain), place)
    if not has_keys and not is_of_this_machine(own):
        tell("duetto: no key is asked for: whoever reaches this address may use it (--api-key-file)")
    reuse(own, True)  # inherited by connections, so that those that linger do not block the next process
    ending = asyncio.create_task(server.end_after(ended))
    await server.serve(sockets=[own])
    ending.cancel()


class Server(uvicorn.Server):
    """Ends in two steps. A first signal calls `drain`, which stops new requests; a second signal ends the
    process."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], object], place: str):
        super().__init__(config)
        self._drain, self._place, self._signals = drain, place, 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        tell(f"duetto: serving {self._place}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(128 + sig)
        tell(f"duetto: {signal.Signals(sig).name}: no more requests are taken; a second signal ends at once")
        self._drain()

    async def end_after(self, event: asyncio.Event) -> None:
        await event.wait()
        self.should_exit = True


# ---------------------------------------------------------------- address and certificates


def reserved(options: ServerOptions) -> socket.socket:
    """Bind the address before a model is read, so that no other process takes it. Raises OSError if it is in
    use."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    own = socket.socket(family, socket.SOCK_STREAM)
    try:
        bind_alone(own, (options.host, options.port))
    except OSError as error:
        own.close()
        raise OSError(f"{options.host} port {options.port}: {error.strerror}") from None
    return own


def bind_alone(own: socket.socket, address: tuple[str, int]) -> None:
    """Bind to an address so that no other socket can, even before this one listens. Raises OSError."""
    try:
        own.bind(address)
    except OSError:  # an earlier server's connections may linger there
        reuse(own, True)
        own.bind(address)
        reuse(own, False)


def reuse(own: socket.socket, allowed: bool) -> None:
    """Set whether the address may be bound again while no socket listens: of two sockets, both must allow
    it."""
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, allowed)


def check_certificates(options: ServerOptions) -> None:
    """Raise ValueError, before a model is read, for certificates that cannot be used."""
    if options.ssl_certfile:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        except OSError as error:
            files = " with ".join(filter(None, (options.ssl_certfile, options.ssl_keyfile)))
            raise ValueError(f"ssl_certfile {files} is not allowed: {error}") from None


def url(options: ServerOptions, own: socket.socket) -> str:
    host, port = own.getsockname()[:2]
    return f"{'https' if options.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def is_of_this_machine(own: socket.socket) -> bool:
    """Return whether only processes of this machine can connect to the socket."""
    return ip_address(own.getsockname()[0].partition("%")[0]).is_loopback

"""Start and shutdown of a server or a router: address, certificates, event loop. Nothing here imports jax."""

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

from ...host.streams import print_stderr
from ...options.server import ServerOptions
from ..service.errors import ERROR_HANDLERS
from .guards import ApiKeyCheck, Guard, guard_middleware
from .http_limits import LimitedHttpProtocol

CLOSING_SECONDS = 3  # seconds until connections are closed after the last request


def run_event_loop(work: Coroutine[Any, Any, int]) -> int:
    """Run `work` in a new event loop (uvloop's, except on Windows) and return its exit code."""
    if sys.platform == "win32":
        return asyncio.run(work)
    import uvloop

    return uvloop.run(work)


def make_guarded_app(
    routes: Sequence[Route],
    options: ServerOptions,
    keys: list[str],
    open_paths: Collection[str],
    inner: Sequence[Middleware] = (),
) -> Starlette:
    """Return an app of routes behind the checks of host, origin and key. `open_paths` need no key.
    `inner` middleware runs after the checks."""
    middleware = [*guard_middleware(options), Middleware(Guard, check=ApiKeyCheck(keys, open_paths)), *inner]
    return Starlette(routes=routes, middleware=middleware, exception_handlers=ERROR_HANDLERS)


async def serve_app(
    app: Starlette, options: ServerOptions, sock: socket.socket, has_keys: bool,
    description: str, start_draining: Callable[[], object], ended: asyncio.Event,
) -> None:  # fmt: skip
    """Serve an app at the bound socket `sock` until `ended` is set. A first signal calls `start_draining`, a
    second one ends the process. `description` is logged: the served models and their address."""
    protocol: Any = partial(LimitedHttpProtocol, seconds=options.receive_timeout)
    config = uvicorn.Config(
        app, http=protocol, ws="none", loop="none", lifespan="off",
        log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=CLOSING_SECONDS,
        ssl_certfile=options.ssl_certfile, ssl_keyfile=options.ssl_keyfile,
    )  # fmt: skip
    server = Server(
        config, partial(asyncio.get_running_loop().call_soon_threadsafe, start_draining), description
    )
    if not has_keys and not is_local_socket(sock):
        print_stderr("duetto: no key is asked for: whoever reaches this address may use it (--api-key-file)")
    # inherited by connections, so that those that linger do not block the next process
    set_address_reuse(sock, True)
    ending = asyncio.create_task(server.exit_after_event(ended))
    await server.serve(sockets=[sock])
    ending.cancel()


class Server(uvicorn.Server):
    """Server that ends in two steps. A first signal calls `drain`, which stops new requests. A second signal
    ends the process."""

    def __init__(self, config: uvicorn.Config, start_draining: Callable[[], object], description: str):
        super().__init__(config)
        self._start_draining, self._description, self._signals = start_draining, description, 0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print_stderr(f"duetto: serving {self._description}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(128 + sig)
        print_stderr(
            f"duetto: {signal.Signals(sig).name}: no more requests are taken; a second signal ends at once"
        )
        self._start_draining()

    async def exit_after_event(self, event: asyncio.Event) -> None:
        await event.wait()
        self.should_exit = True


# ---------------------------------------------------------------- address and certificates


def bind_socket(options: ServerOptions) -> socket.socket:
    """Bind a socket to the options' address. This is done before a model is read, so that no other process
    takes the address. Raises OSError if it is in use."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        bind_exclusively(sock, (options.host, options.port))
    except OSError as error:
        sock.close()
        raise OSError(f"{options.host} port {options.port}: {error.strerror}") from None
    return sock


def bind_exclusively(sock: socket.socket, address: tuple[str, int]) -> None:
    """Bind a socket to an address. No other socket can bind it, even before this one listens. Raises
    OSError."""
    try:
        sock.bind(address)
    except OSError:  # an earlier server's connections may linger there
        set_address_reuse(sock, True)
        sock.bind(address)
        set_address_reuse(sock, False)


def set_address_reuse(sock: socket.socket, is_allowed: bool) -> None:
    """Set SO_REUSEADDR: two sockets may have one address if both set it and none listens."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, is_allowed)


def check_certificates(options: ServerOptions) -> None:
    """Raise ValueError for certificates that cannot be used. Called before a model is read."""
    if options.ssl_certfile:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        except OSError as error:
            files = " with ".join(filter(None, (options.ssl_certfile, options.ssl_keyfile)))
            raise ValueError(f"ssl_certfile {files} is not allowed: {error}") from None


def server_url(options: ServerOptions, sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"{'https' if options.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def is_local_socket(sock: socket.socket) -> bool:
    """Return whether the socket's address is a loopback address, which only this machine can reach."""
    return ip_address(sock.getsockname()[0].partition("%")[0]).is_loopback

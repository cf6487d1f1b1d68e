"""A server's life: from an address and certificates that are looked at before a model is read, to the end of
the last stream."""

import asyncio
import os
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from types import FrameType
from typing import Any

import uvicorn

from ..api.llm import LLM
from ..host.heap import freeze_what_lasts
from ..host.streams import tell
from ..options.server import ServerOptions
from ..service.service import Service
from .app import app
from .keys import keys_in
from .protocol import protocol
from .tracing import Tracing, tracing_to

if sys.platform == "win32":  # uvloop is not there
    from asyncio import run
else:
    from uvloop import run

CLOSING = 3  # seconds that connections have after the last request


@dataclass(frozen=True)
class Front:
    """What a server has before its model is read: an address, the keys of its clients, and where spans go."""

    own: socket.socket
    keys: list[str]
    tracing: Tracing | None


def front(options: ServerOptions) -> Front:
    """Raises OSError and ValueError for what cannot be had."""
    keys = keys_in(options.api_key_file) if options.api_key_file else []
    check_certificates(options)
    tracing = tracing_to(options.otlp_traces_endpoint) if options.otlp_traces_endpoint else None
    return Front(reserved(options), keys, tracing)


def reserved(options: ServerOptions) -> socket.socket:
    """The address, which nobody else has from here on, before a model is read. Raises OSError where somebody
    has it."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    own = socket.socket(family, socket.SOCK_STREAM)
    try:
        bind_alone(own, (options.host, options.port))
    except OSError as error:
        own.close()
        raise OSError(f"{options.host} port {options.port}: {error.strerror}") from None
    return own


def bind_alone(own: socket.socket, address: tuple[str, int]) -> None:
    """Bind to an address so that nobody else can, though nobody listens there yet. Raises OSError."""
    try:
        own.bind(address)
    except OSError:  # an earlier server's connections may linger there
        reuse(own, True)
        own.bind(address)
        reuse(own, False)


def reuse(own: socket.socket, allowed: bool) -> None:
    """Whether the address may be taken while nobody listens there: of two sockets, both have to allow it."""
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, allowed)


def check_certificates(options: ServerOptions) -> None:
    """Raises ValueError, before a model is read, for certificates that cannot be used."""
    if options.ssl_certfile:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(options.ssl_certfile, options.ssl_keyfile)
        except OSError as error:
            files = " with ".join(filter(None, (options.ssl_certfile, options.ssl_keyfile)))
            raise ValueError(f"ssl_certfile {files} is not allowed: {error}") from None


class Server(uvicorn.Server):
    """Ends in two steps: at a first signal it takes no more requests, and ends when those under way are done;
    a second one ends the process."""

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


def served(llm: LLM, options: ServerOptions, defaults: dict[str, Any], front: Front) -> int:
    """Serve until a signal, or until the engine fails; the exit code."""
    freeze_what_lasts()
    return run(serve(llm, options, defaults, front))


async def serve(llm: LLM, options: ServerOptions, defaults: dict[str, Any], front: Front) -> int:
    service = Service(llm, options, defaults)
    config = uvicorn.Config(
        app(service, front.keys, front.tracing), http=protocol(options.receive_timeout), ws="none",
        loop="none", lifespan="off", log_level="warning", access_log=False, server_header=False,
        timeout_graceful_shutdown=CLOSING, ssl_certfile=options.ssl_certfile,
        ssl_keyfile=options.ssl_keyfile,
    )  # fmt: skip
    loop, own_url = asyncio.get_running_loop(), url(options, front.own)
    place = f"{', '.join(service.names)} at {own_url}/v1, to try on {own_url}/docs"
    server = Server(config, partial(loop.call_soon_threadsafe, service.drain), place)
    ending = asyncio.create_task(end(service, server))
    if not front.keys and not is_of_this_machine(front.own):
        tell("duetto: no key is asked for: whoever reaches this address may use it (--api-key-file)")
    reuse(front.own, True)  # connections that outlive the server have this of it, and do not bar the next one
    await server.serve(sockets=[front.own])
    ending.cancel()
    await service.close()
    if front.tracing is not None:
        await front.tracing.close()
    if service.error is not None:
        tell(f"duetto: the engine has failed: {service.error}")
    return 0 if service.error is None else 1


def url(options: ServerOptions, own: socket.socket) -> str:
    host, port = own.getsockname()[:2]
    return f"{'https' if options.ssl_certfile else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def is_of_this_machine(own: socket.socket) -> bool:
    """Whether nobody elsewhere reaches its address."""
    return ip_address(own.getsockname()[0].partition("%")[0]).is_loopback


async def end(service: Service, server: uvicorn.Server) -> None:
    await service.ended.wait()
    server.should_exit = True

"""A server's life: from an address that is reserved before a model is read to the last stream's end."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ..api.llm import LLM
from ..host.streams import tell
from ..options.server import ServerOptions
from .app import app
from .keys import keys_in
from .service import Service

CLOSING = 10  # seconds that connections have after the last request


def reserved(options: ServerOptions) -> socket.socket:
    """The address, which nobody else can take from now on. Raises OSError where somebody has it."""
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    own = socket.socket(family, socket.SOCK_STREAM)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        own.bind((options.host, options.port))
    except OSError as error:
        own.close()
        raise OSError(f"{options.host} port {options.port}: {error.strerror}") from None
    return own


def protocol(seconds: float) -> type[HttpToolsProtocol]:
    """HTTP whose clients have to send the head of a request in so many seconds; uvicorn waits for ever."""

    class Prompt(HttpToolsProtocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._late = self.loop.call_later(seconds, transport.close)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if self._late.when() < self.loop.time():
                self._late = self.loop.call_later(seconds, self.transport.close)

        def on_headers_complete(self) -> None:
            self._late.cancel()
            super().on_headers_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._late.cancel()
            super().connection_lost(exc)

    return Prompt


class Server(uvicorn.Server):
    """Ends in two steps: at a first signal it takes no more requests, and ends when those under way are done;
    a second one ends the process."""

    def __init__(self, config: uvicorn.Config, drain: Callable[[], object]):
        super().__init__(config)
        self._drain, self._signals = drain, 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            os._exit(128 + sig)
        tell(f"duetto: {signal.Signals(sig).name}: no more requests are taken; a second signal ends at once")
        self._drain()


def served(
    llm: LLM, names: Sequence[str], options: ServerOptions, defaults: dict[str, Any], own: socket.socket
) -> int:
    """Serve until a signal, or until the engine fails; the exit code. Raises OSError for a file of keys or
    certificates that cannot be read."""
    keys = keys_in(options.api_key_file) if options.api_key_file else []
    return uvloop.run(serve(llm, names, options, defaults, own, keys))


async def serve(
    llm: LLM,
    names: Sequence[str],
    options: ServerOptions,
    defaults: dict[str, Any],
    own: socket.socket,
    keys: list[str],
) -> int:
    service = Service(llm, names, options, defaults)
    config = uvicorn.Config(
        app(service, keys), loop="none", http=protocol(options.receive_timeout), ws="none", lifespan="off",
        log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=CLOSING,
        ssl_certfile=options.ssl_certfile, ssl_keyfile=options.ssl_keyfile,
    )  # fmt: skip
    loop = asyncio.get_running_loop()
    server = Server(config, partial(loop.call_soon_threadsafe, service.drain))
    ending = asyncio.create_task(end(service, server))
    host, port = own.getsockname()[:2]
    place = f"[{host}]" if ":" in host else host
    kind = "https" if options.ssl_certfile else "http"
    tell(f"duetto: serving {', '.join(names)} at {kind}://{place}:{port}/v1")
    await server.serve(sockets=[own])
    ending.cancel()
    await service.close()
    if service.error is not None:
        tell(f"duetto: the engine has failed: {service.error}")
    return 0 if service.error is None else 1


async def end(service: Service, server: uvicorn.Server) -> None:
    await service.ended.wait()
    server.should_exit = True

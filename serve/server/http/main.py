"""A server's life: from an address and certificates that are looked at before a model is read, to the end of
the last stream."""

import asyncio
import socket
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import uvicorn

from ...host.heap import freeze_what_lasts
from ...host.streams import tell
from ...kv.events import EventsConfig, Publisher, events_of
from ...llm.llm import LLM
from ...options.server import ServerOptions
from ..service.service import Service
from .address import Server, check_certificates, is_of_this_machine, reserved, reuse, url
from .app import app
from .auth import keys_in
from .http_limits import protocol
from .tracing import Tracing, tracing_to

if sys.platform == "win32":  # uvloop is not there
    from asyncio import run
else:
    from uvloop import run

CLOSING = 3  # seconds that connections have after the last request


@dataclass(frozen=True)
class ServerResources:
    """What a server has before its model is read: an address, the keys of its clients, where spans go, and
    events of the cache."""

    own: socket.socket
    keys: list[str]
    tracing: Tracing | None
    events: EventsConfig


def front(options: ServerOptions) -> ServerResources:
    """Raises OSError and ValueError for what cannot be had."""
    keys = keys_in(options.api_key_file) if options.api_key_file else []
    check_certificates(options)
    tracing = tracing_to(options.otlp_traces_endpoint) if options.otlp_traces_endpoint else None
    return ServerResources(reserved(options), keys, tracing, events_of(options))


def served(llm: LLM, options: ServerOptions, defaults: dict[str, Any], front: ServerResources) -> int:
    """Serve until a signal, or until the engine fails; the exit code."""
    freeze_what_lasts()
    return run(serve(llm, options, defaults, front))


async def serve(llm: LLM, options: ServerOptions, defaults: dict[str, Any], front: ServerResources) -> int:
    publisher = published(llm, front.events)
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
    if publisher is not None:
        publisher.close()
    if front.tracing is not None:
        await front.tracing.close()
    if service.error is not None:
        tell(f"duetto: the engine has failed: {service.error}")
    return 0 if service.error is None else 1


def published(llm: LLM, config: EventsConfig) -> Publisher | None:
    """Whoever tells of the cache's pages, where they are found by name and somebody is to be told."""
    root = llm.engine.scheduler.root
    if not config.is_on or root is None:
        return None
    publisher = Publisher(config, root, llm.engine.tables.page_size)
    llm.engine.tables.listen(publisher)
    return publisher


async def end(service: Service, server: uvicorn.Server) -> None:
    await service.ended.wait()
    server.should_exit = True

"""A server process: its resources before a model is read, its routes, and its end."""

import socket
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware

from ...host.process import freeze_what_lasts
from ...host.streams import tell
from ...kv.events import EventsConfig, Publisher, events_of
from ...llm.llm import LLM
from ...options.server import ServerOptions
from ..routes import completions
from ..routes.adapters import Adapters
from ..routes.embeddings import Embeddings
from ..routes.openapi import ApiPage
from ..routes.profile import Profile
from ..routes.state import ServerState
from ..routes.tokens import TokenRoutes
from ..routes.weights import Weights
from ..service.service import Service
from .guards import keys_in
from .lifecycle import check_certificates, guarded_app, reserved, run, serve_app, url
from .tracing import Traced, Tracing, tracing_to


@dataclass(frozen=True)
class ServerResources:
    """Resources that a server takes before its model is read.

    own: bound socket
    keys: API keys of its clients; empty: no key is needed
    tracing: exporter of spans, if any
    events: where KV cache events are published
    """

    own: socket.socket
    keys: list[str]
    tracing: Tracing | None
    events: EventsConfig


def front(options: ServerOptions) -> ServerResources:
    """Take the resources. Raises OSError and ValueError for those that cannot be had."""
    keys = keys_in(options.api_key_file) if options.api_key_file else []
    check_certificates(options)
    tracing = tracing_to(options.otlp_traces_endpoint) if options.otlp_traces_endpoint else None
    return ServerResources(reserved(options), keys, tracing, events_of(options))


def served(llm: LLM, options: ServerOptions, defaults: dict[str, Any], front: ServerResources) -> int:
    """Serve until a signal or a failure of the engine. Returns the exit code."""
    freeze_what_lasts()
    return run(serve(llm, options, defaults, front))


async def serve(llm: LLM, options: ServerOptions, defaults: dict[str, Any], front: ServerResources) -> int:
    publisher = published(llm, front.events)
    service = Service(llm, options, defaults)
    own_app, address = app(service, front.keys, front.tracing), url(options, front.own)
    place = f"{', '.join(service.names)} at {address}/v1, to try on {address}/docs"
    await serve_app(own_app, options, front.own, bool(front.keys), place, service.drain, service.ended)
    await service.close()
    if publisher is not None:
        publisher.close()
    if front.tracing is not None:
        await front.tracing.close()
    if service.error is not None:
        tell(f"duetto: the engine has failed: {service.error}")
    return 0 if service.error is None else 1


def published(llm: LLM, config: EventsConfig) -> Publisher | None:
    """Return the publisher of KV cache events; None without prefix caching or without events."""
    root = llm.engine.scheduler.root
    if not config.is_on or root is None:
        return None
    publisher = Publisher(config, root, llm.engine.tables.page_size)
    llm.engine.tables.listen(publisher)
    return publisher


def app(service: Service, keys: list[str], tracing: Tracing | None) -> Starlette:
    """Return the app of a service; with `keys`, clients need one."""
    paths = [*completions.paths(service), *Embeddings(service).paths, *TokenRoutes(service).paths]
    paths += ServerState(service).paths
    if service.options.runtime_lora_updating:
        paths += Adapters(service).paths
    if service.options.profile_dir is not None:
        paths += Profile(service, service.options.profile_dir).paths
    if service.options.weights_dir is not None:
        paths += Weights(service, service.options.weights_dir).paths
    paths += ApiPage(paths, has_keys=bool(keys)).paths
    open = [path.path for path in paths if path.is_open]
    inner = [] if tracing is None else [Middleware(Traced, tracing=tracing)]
    return guarded_app([path.route for path in paths], service.options, keys, open, inner)

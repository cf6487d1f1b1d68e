"""A server process: its resources before a model is read, its routes, and its end."""

import socket
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware

from ...host.process import freeze_lasting_objects
from ...host.streams import print_stderr
from ...kv.events import EventPublisher, EventsConfig, read_events_config
from ...llm.llm import LLM
from ...options.server import ServerOptions
from ..routes import completions
from ..routes.adapters import AdapterRoutes
from ..routes.embeddings import EmbeddingRoute
from ..routes.openapi import ApiPage
from ..routes.profile import ProfileRoutes
from ..routes.state import StateRoutes
from ..routes.tokens import TokenRoutes
from ..routes.weights import WeightRoutes
from ..service.service import Service
from .guards import read_api_keys
from .lifecycle import (
    bind_socket,
    check_certificates,
    make_guarded_app,
    run_event_loop,
    serve_app,
    server_url,
)
from .tracing import Tracing, TracingMiddleware, make_tracing


@dataclass(frozen=True)
class ServerResources:
    """Resources that a server acquires before its model is read.

    sock: bound socket
    keys: API keys of its clients; empty if no key is needed
    tracing: exporter of spans, if any
    events: configuration of the publisher of KV cache events
    """

    sock: socket.socket
    keys: list[str]
    tracing: Tracing | None
    events: EventsConfig


def acquire_resources(options: ServerOptions) -> ServerResources:
    """Acquire the resources of a server. Raises OSError or ValueError if one is not available."""
    keys = read_api_keys(options.api_key_file) if options.api_key_file else []
    check_certificates(options)
    tracing = make_tracing(options.otlp_traces_endpoint) if options.otlp_traces_endpoint else None
    return ServerResources(bind_socket(options), keys, tracing, read_events_config(options))


def run_server(llm: LLM, options: ServerOptions, defaults: dict[str, Any], resources: ServerResources) -> int:
    """Serve an LLM until a signal or a failure of the engine. Returns the exit code."""
    freeze_lasting_objects()
    return run_event_loop(serve_until_ended(llm, options, defaults, resources))


async def serve_until_ended(
    llm: LLM, options: ServerOptions, defaults: dict[str, Any], resources: ServerResources
) -> int:
    publisher = start_publisher(llm, resources.events)
    service = Service(llm, options, defaults)
    asgi_app = make_server_app(service, resources.keys, resources.tracing)
    address = server_url(options, resources.sock)
    description = f"{', '.join(service.names)} at {address}/v1, to try on {address}/docs"
    await serve_app(
        asgi_app,
        options,
        resources.sock,
        bool(resources.keys),
        description,
        service.start_draining,
        service.ended,
    )
    await service.close()
    if publisher is not None:
        publisher.close()
    if resources.tracing is not None:
        await resources.tracing.close()
    if service.error is not None:
        print_stderr(f"duetto: the engine has failed: {service.error}")
    return 0 if service.error is None else 1


def start_publisher(llm: LLM, config: EventsConfig) -> EventPublisher | None:
    """Start the publisher of KV cache events. Returns None without prefix caching or without events."""
    root = llm.engine.scheduler.root_hash
    if not config.is_on or root is None:
        return None
    publisher = EventPublisher(config, root, llm.engine.tables.page_size)
    llm.engine.tables.set_listener(publisher)
    return publisher


def make_server_app(service: Service, keys: list[str], tracing: Tracing | None) -> Starlette:
    """Return the app of a service. If there are `keys`, clients need one of them."""
    routes = [
        *completions.completion_routes(service),
        *EmbeddingRoute(service).routes,
        *TokenRoutes(service).routes,
    ]
    routes += StateRoutes(service).routes
    if service.options.runtime_lora_updating:
        routes += AdapterRoutes(service).routes
    if service.options.profile_dir is not None:
        routes += ProfileRoutes(service, service.options.profile_dir).routes
    if service.options.weights_dir is not None:
        routes += WeightRoutes(service, service.options.weights_dir).routes
    routes += ApiPage(routes, has_keys=bool(keys)).routes
    open_paths = [route.path for route in routes if route.is_open]
    inner = [] if tracing is None else [Middleware(TracingMiddleware, tracing=tracing)]
    return make_guarded_app(
        [route.starlette_route for route in routes], service.options, keys, open_paths, inner
    )

"""A router process: its routes, its parts, and its end."""

import asyncio
import socket
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...kv.events import KVEventBatch, import_zmq
from ...kv.routing.placement import Replica
from ...kv.routing.prefix_index import AssumedPrefixIndex, EventPrefixIndex
from ...options.router import RouterOptions
from ...options.server import ServerOptions
from ...text.tokenizer.tokenizer import Tokenizer
from ..http.lifecycle import make_guarded_app, run_event_loop, serve_app, server_url
from ..service.exposition import Exposition
from .events import Listener, PrefixIndexUpdater
from .health import HealthChecker
from .http_client import ServerAddress
from .prompts import PageHasher, TextPageHasher, TokenPageHasher
from .proxy import Proxy
from .request_queue import PrefillPool, RequestQueue

POST_PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
)
GET_PATHS = ("/v1/models", "/v1/models/{name:path}", "/tokenizer_info", "/version", "/openapi.json", "/docs")
OPEN_PATHS = ("/health", "/ready", "/openapi.json", "/docs")


def make_page_hasher(options: RouterOptions) -> PageHasher:
    """Make the function that hashes a prompt's pages. Raises ValueError for a folder without a tokenizer, and
    without ZeroMQ if the router receives events."""
    if options.kv_events is not None:
        import_zmq("kv_events")
    if options.tokenizer is None:
        return TextPageHasher(options.page_size)
    tokenizer = Tokenizer.from_folder(options.tokenizer)
    if tokenizer is None:
        raise ValueError(f"tokenizer {options.tokenizer!r} is not allowed: the folder has none")
    return TokenPageHasher(tokenizer, options.page_size)


def make_replicas(options: RouterOptions) -> list[Replica]:
    """Make a replica for each server, with an index of its cached prompts."""
    has_events, max_pages = options.kv_events is not None, options.cache_tokens // options.page_size
    return [
        Replica(
            str(ServerAddress.from_url(url)),
            EventPrefixIndex() if has_events else AssumedPrefixIndex(max_pages),
        )
        for url in options.servers
    ]


def make_queue_and_prefills(
    replicas: Sequence[Replica], options: RouterOptions, server: ServerOptions
) -> tuple[RequestQueue, PrefillPool]:
    """Make the queue of the replicas that answer, and the pool of prefill engines (the last replicas)."""
    count, max_in_flight = len(options.replica), options.max_in_flight
    addresses = [pair.partition("=")[2] for pair in options.prefill]
    prefills = dict(zip(replicas[count:], addresses, strict=True))
    return RequestQueue(replicas[:count], max_in_flight, server), PrefillPool(prefills, max_in_flight)


def run_router(options: RouterOptions, server: ServerOptions, sock: socket.socket, keys: list[str]) -> int:
    """Run a router until a signal. Returns the exit code."""
    return run_event_loop(serve_router(options, server, sock, keys))


async def serve_router(
    options: RouterOptions, server: ServerOptions, sock: socket.socket, keys: list[str]
) -> int:
    replicas = make_replicas(options)
    queue, prefills = make_queue_and_prefills(replicas, options, server)
    proxy = Proxy(queue, prefills, make_page_hasher(options), options, server)
    health_checker, listener = HealthChecker(replicas, queue, options), start_listener(replicas, options)
    asgi_app = make_router_app(replicas, proxy, server, keys)
    description = f"{len(replicas)} replicas at {server_url(server, sock)}/v1"
    await serve_app(asgi_app, server, sock, bool(keys), description, proxy.start_draining, proxy.ended)
    health_checker.close()
    proxy.admission.close()
    if listener is not None:
        listener.close()
    return 0


def start_listener(replicas: Sequence[Replica], options: RouterOptions) -> Listener | None:
    """Start the listener for the replicas' KV cache events. Returns None if the options name none. It is
    called in the event loop, where all events are handled."""
    if options.kv_events is None:
        return None
    loop, prefix_indexes = asyncio.get_running_loop(), [replica.prefix_index for replica in replicas]
    updaters = [
        PrefixIndexUpdater(prefix_index, options.page_size)
        for prefix_index in prefix_indexes
        if isinstance(prefix_index, EventPrefixIndex)
    ]

    def on_events(replica: int, number: int, events: KVEventBatch) -> None:
        loop.call_soon_threadsafe(updaters[replica].apply_batch, number, events)

    return Listener(options.kv_events, on_events)


def make_router_app(
    replicas: Sequence[Replica], proxy: Proxy, options: ServerOptions, keys: list[str]
) -> Starlette:
    """Return the app of a router: its own routes, and the routes that replicas answer. If there are `keys`,
    clients need one of them."""
    metrics = Exposition(partial(router_metric_families, replicas, proxy))

    async def answer_health(request: Request) -> Response:
        return Response()

    async def answer_ready(request: Request) -> Response:
        is_ready = not proxy.is_draining and any(replica.is_ready for replica in proxy.queue.replicas)
        return Response(status_code=200 if is_ready else 503)

    async def answer_metrics(request: Request) -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)

    routes = [
        Route("/health", answer_health),
        Route("/ready", answer_ready),
        Route("/metrics", answer_metrics),
    ]
    routes += [Route(path, proxy, methods=["POST"]) for path in POST_PATHS]
    routes += [Route(path, proxy, methods=["GET"]) for path in GET_PATHS]
    return make_guarded_app(routes, options, keys, OPEN_PATHS)


# ---------------------------------------------------------------- metrics

COUNTER_METRICS: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "requests": ("requests sent", lambda replica: replica.chosen),
    "prompt_tokens": ("tokens of their prompts", lambda replica: replica.prompt_tokens),
    "hit_tokens": ("those that were thought to be cached there", lambda replica: replica.hit_tokens),
    "lost": ("times that it did not answer", lambda replica: replica.lost),
}
GAUGE_METRICS: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "ready": ("whether it takes requests", lambda replica: replica.is_ready),
    "up": ("whether it answers", lambda replica: replica.is_up),
    "running": ("requests that it has", lambda replica: len(replica.requests)),
    "load": ("what it has to do, in tokens of prefill", lambda replica: replica.load),
}
METRIC_TABLES = (
    (CounterMetricFamily, "router", COUNTER_METRICS),
    (GaugeMetricFamily, "router_replica", GAUGE_METRICS),
)


def router_metric_families(replicas: Sequence[Replica], proxy: Proxy) -> Iterator[Metric]:
    for kind, prefix, table in METRIC_TABLES:
        for name, (about, value) in table.items():
            family = kind(f"duetto:{prefix}_{name}", about, labels=["replica"])
            for replica in replicas:
                family.add_metric([str(replica)], float(value(replica)))
            yield family
    yield GaugeMetricFamily("duetto:router_waiting", "requests in line", float(proxy.queue.num_waiting))
    yield CounterMetricFamily("duetto:router_resumed", "answers gone on elsewhere", proxy.num_resumed)
    yield CounterMetricFamily("duetto:router_retried", "requests asked again", proxy.num_retried)

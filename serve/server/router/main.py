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

from ...kv.events import KVEventBatch, zmq
from ...kv.routing.placement import Replica
from ...kv.routing.prefix_index import AssumedPrefixIndex, EventPrefixIndex
from ...options.router import RouterOptions
from ...options.server import ServerOptions
from ...text.tokenizer.tokenizer import Tokenizer
from ..http.lifecycle import guarded_app, run, serve_app, url
from ..service.exposition import Exposition
from .events import Listener, ReplicaPages
from .health import Health
from .http import ServerAddress
from .prompts import Naming, TextNaming, TokenNaming
from .proxy import Proxy
from .queue import PrefillPool, RequestQueue

POSTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
)
GETS = ("/v1/models", "/v1/models/{name:path}", "/tokenizer_info", "/version", "/openapi.json", "/docs")
OPEN = ("/health", "/ready", "/openapi.json", "/docs")


def naming(options: RouterOptions) -> Naming:
    """Return how prompts are named. Raises ValueError for a folder without a tokenizer, and without ZeroMQ if
    it is to receive events."""
    if options.kv_events is not None:
        zmq("kv_events")
    if options.tokenizer is None:
        return TextNaming(options.page_size)
    tokenizer = Tokenizer.from_folder(options.tokenizer)
    if tokenizer is None:
        raise ValueError(f"tokenizer {options.tokenizer!r} is not allowed: the folder has none")
    return TokenNaming(tokenizer, options.page_size)


def replicas_of(options: RouterOptions) -> list[Replica]:
    """Return the servers, each with an index of the prompts that it caches."""
    has_events, most = options.kv_events is not None, options.cache_tokens // options.page_size
    return [
        Replica(str(ServerAddress.of(url)), EventPrefixIndex() if has_events else AssumedPrefixIndex(most))
        for url in options.servers
    ]


def line_and_prefills(
    replicas: Sequence[Replica], options: RouterOptions, server: ServerOptions
) -> tuple[RequestQueue, PrefillPool]:
    """Return the queue of the replicas that answer, and the pool of those that prefill."""
    count, most = len(options.replica), options.max_in_flight
    addresses = [pair.partition("=")[2] for pair in options.prefill]
    prefills = dict(zip(replicas[count:], addresses, strict=True))
    return RequestQueue(replicas[:count], most, server), PrefillPool(prefills, most)


def routed(options: RouterOptions, server: ServerOptions, own: socket.socket, keys: list[str]) -> int:
    """Route until a signal. Returns the exit code."""
    return run(route(options, server, own, keys))


async def route(options: RouterOptions, server: ServerOptions, own: socket.socket, keys: list[str]) -> int:
    replicas = replicas_of(options)
    line, prefills = line_and_prefills(replicas, options, server)
    proxy = Proxy(line, prefills, naming(options), options, server)
    health, listener = Health(replicas, line, options), listening(replicas, options)
    own_app, place = app(replicas, proxy, server, keys), f"{len(replicas)} replicas at {url(server, own)}/v1"
    await serve_app(own_app, server, own, bool(keys), place, proxy.drain, proxy.idle)
    health.close()
    if listener is not None:
        listener.close()
    return 0


def listening(replicas: Sequence[Replica], options: RouterOptions) -> Listener | None:
    """Return the listener for KV cache events of the replicas, if they publish them. Called in the event
    loop, where all events are handled."""
    if options.kv_events is None:
        return None
    loop, memories = asyncio.get_running_loop(), [one.memory for one in replicas]
    pages = [
        ReplicaPages(memory, options.page_size) for memory in memories if isinstance(memory, EventPrefixIndex)
    ]

    def on_events(replica: int, number: int, events: KVEventBatch) -> None:
        loop.call_soon_threadsafe(pages[replica].take, number, events)

    return Listener(options.kv_events, on_events)


def app(replicas: Sequence[Replica], proxy: Proxy, options: ServerOptions, keys: list[str]) -> Starlette:
    """Return the app of a router: own routes, and those that replicas answer; with `keys`, clients need
    one."""
    metrics = Exposition(partial(router_families, replicas, proxy))

    async def health(request: Request) -> Response:
        return Response()

    async def ready(request: Request) -> Response:
        takes = not proxy.is_draining and any(one.is_ready for one in proxy.line.replicas)
        return Response(status_code=200 if takes else 503)

    async def counts(request: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    routes = [Route("/health", health), Route("/ready", ready), Route("/metrics", counts)]
    routes += [Route(path, proxy, methods=["POST"]) for path in POSTS]
    routes += [Route(path, proxy, methods=["GET"]) for path in GETS]
    return guarded_app(routes, options, keys, OPEN)


# ---------------------------------------------------------------- metrics

COUNTS: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "requests": ("requests sent", lambda one: one.chosen),
    "prompt_tokens": ("tokens of their prompts", lambda one: one.prompt_tokens),
    "hit_tokens": ("those that were thought to be cached there", lambda one: one.hit_tokens),
    "lost": ("times that it did not answer", lambda one: one.lost),
}
STATES: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "ready": ("whether it takes requests", lambda one: one.is_ready),
    "up": ("whether it answers", lambda one: one.is_up),
    "running": ("requests that it has", lambda one: len(one.jobs)),
    "load": ("what it has to do, in tokens of prefill", lambda one: one.load),
}
KINDS = (CounterMetricFamily, "router", COUNTS), (GaugeMetricFamily, "router_replica", STATES)


def router_families(replicas: Sequence[Replica], proxy: Proxy) -> Iterator[Metric]:
    for kind, prefix, table in KINDS:
        for name, (about, value) in table.items():
            family = kind(f"duetto:{prefix}_{name}", about, labels=["replica"])
            for one in replicas:
                family.add_metric([str(one)], float(value(one)))
            yield family
    yield GaugeMetricFamily("duetto:router_waiting", "requests in line", float(proxy.line.waiting))
    yield CounterMetricFamily("duetto:router_resumed", "answers gone on elsewhere", proxy.resumed)
    yield CounterMetricFamily("duetto:router_retried", "requests asked again", proxy.retried)

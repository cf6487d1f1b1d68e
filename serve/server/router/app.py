"""The paths of a router."""

from collections.abc import Sequence
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...kv.routing.placement import Replica
from ...options.server import ServerOptions
from ..http.lifecycle import guarded_app
from ..service.metrics import Exposition
from .metrics import router_families
from .proxy import Proxy

ASKED = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
)
TOLD = ("/v1/models", "/v1/models/{name:path}", "/tokenizer_info", "/version", "/openapi.json", "/docs")
OPEN = ("/health", "/ready", "/openapi.json", "/docs")


def app(replicas: Sequence[Replica], proxy: Proxy, options: ServerOptions, keys: list[str]) -> Starlette:
    """What a router answers itself, and what its replicas answer; with keys, to those who have one."""
    metrics = Exposition(partial(router_families, replicas, proxy))

    async def health(request: Request) -> Response:
        """Whether the router lives."""
        return Response()

    async def ready(request: Request) -> Response:
        """Whether requests are taken."""
        takes = not proxy.is_draining and any(one.is_ready for one in proxy.line.replicas)
        return Response(status_code=200 if takes else 503)

    async def counts(request: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE_LATEST)

    routes = [Route("/health", health), Route("/ready", ready), Route("/metrics", counts)]
    routes += [Route(path, proxy, methods=["POST"]) for path in ASKED]
    routes += [Route(path, proxy, methods=["GET"]) for path in TOLD]
    return guarded_app(routes, options, keys, OPEN)

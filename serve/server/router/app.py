"""The paths of a router."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...kv.routing.placement import Replica
from ...options.server import ServerOptions
from ..http.auth import Keys
from ..http.cors import guards
from ..service.errors import HANDLERS
from .metrics import CONTENT_TYPE, RouterMetrics
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
    metrics = RouterMetrics(replicas, proxy)

    async def health(request: Request) -> Response:
        """Whether the router lives."""
        return Response()

    async def ready(request: Request) -> Response:
        """Whether requests are taken."""
        takes = not proxy.is_draining and any(one.is_ready for one in proxy.line.replicas)
        return Response(status_code=200 if takes else 503)

    async def counts(request: Request) -> Response:
        return Response(metrics.text(), media_type=CONTENT_TYPE)

    routes = [Route("/health", health), Route("/ready", ready), Route("/metrics", counts)]
    routes += [Route(path, proxy, methods=["POST"]) for path in ASKED]
    routes += [Route(path, proxy, methods=["GET"]) for path in TOLD]
    middleware = [*guards(options), Middleware(Keys, keys=keys, open=OPEN)]
    return Starlette(routes=routes, middleware=middleware, exception_handlers=HANDLERS)

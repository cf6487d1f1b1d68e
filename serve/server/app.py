"""The paths of the server."""

import asyncio
import time
from importlib.metadata import version

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .completions import Completions
from .errors import HANDLERS, json_response
from .keys import Keys
from .metrics import CONTENT_TYPE, EngineMetrics
from .service import Service
from .tokens import Tokens


def app(service: Service, keys: list[str]) -> Starlette:
    """Everything that a service answers; with keys, to those who have one."""
    state, tokens = State(service), Tokens(service)
    routes = [
        Route("/v1/completions", Completions(service, "completion"), methods=["POST"]),
        Route("/v1/chat/completions", Completions(service, "chat"), methods=["POST"]),
        Route("/v1/models", state.models),
        Route("/v1/models/{name:path}", state.model),
        Route("/tokenize", tokens.tokenize, methods=["POST"]),
        Route("/detokenize", tokens.detokenize, methods=["POST"]),
        Route("/tokenizer_info", tokens.info),
        Route("/health", state.health),
        Route("/ready", state.ready),
        Route("/version", state.version),
        Route("/metrics", state.metrics),
    ]
    return Starlette(routes=routes, middleware=[Middleware(Keys, keys=keys)], exception_handlers=HANDLERS)


class State:
    """What a server says of itself."""

    def __init__(self, service: Service):
        self.service, self._since = service, int(time.time())
        self._metrics = EngineMetrics(service.llm, service.names[0])

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model(name) for name in self.service.names]})

    async def model(self, request: Request) -> Response:
        return json_response(self._model(self.service.known(request.path_params["name"])))

    def _model(self, name: str) -> dict[str, object]:
        about = {"id": name, "object": "model", "created": self._since, "owned_by": "duetto"}
        return about | {"root": self.service.names[0], "max_model_len": self.service.max_model_len}

    async def health(self, request: Request) -> Response:
        """Whether the engine lives."""
        return Response(status_code=200 if self.service.error is None else 503)

    async def ready(self, request: Request) -> Response:
        """Whether requests are taken."""
        return Response(status_code=503 if self.service.error or self.service.is_draining else 200)

    async def version(self, request: Request) -> Response:
        return json_response({"version": version("duetto")})

    async def metrics(self, request: Request) -> Response:
        return Response(await asyncio.to_thread(self._metrics.text), media_type=CONTENT_TYPE)

"""Models, health, version and metrics of a server."""

import asyncio
import time
from functools import partial
from importlib.metadata import version
from typing import Literal, TypedDict

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from ..service.errors import json_response
from ..service.metrics import Exposition
from ..service.service import Service
from .body import REALM
from .metrics import engine_families
from .openapi import Path


class Model(TypedDict):
    """A name that the model is served under, and the number of tokens that a request may have. An adapter has
    the model as its `parent` and its folder as `root`."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class Models(TypedDict):
    """All names."""

    object: Literal["list"]
    data: list[Model]


class Version(TypedDict):
    version: str


class ServerState:
    """Routes for the state of a server."""

    def __init__(self, service: Service):
        self.service, self._since = service, int(time.time())
        read = partial(engine_families, service.llm, service.names[0])
        self._metrics = Exposition(read, service.lag.histogram)
        self.paths = [
            Path("/v1/models", self.models, "the served names", reply=Models),
            Path("/v1/models/{name:path}", self.model, "one of them", reply=Model, errors=[404]),
            Path("/health", self.health, "whether the engine lives", media=None, errors=[503], is_open=True),
            Path("/ready", self.ready, "whether requests are taken", media=None, errors=[503], is_open=True),
            Path("/version", self.version, "duetto's version", reply=Version),
            Path("/metrics", self.metrics, "counts and times for Prometheus", media="text/plain"),
        ]

    async def models(self, request: Request) -> Response:
        names = [*self.service.names, *self.service.adapters]
        return json_response({"object": "list", "data": list(map(self._model, names))})

    async def model(self, request: Request) -> Response:
        return json_response(self._model(self.service.known(request.path_params["name"])))

    def _model(self, name: str) -> dict[str, object]:
        about = {"id": name, "object": "model", "created": self._since, "owned_by": "duetto"}
        base, adapter = self.service.names[0], self.service.adapters.get(name)
        root, parent = base, None
        if adapter is not None:
            root, parent = adapter.lora_path, adapter.base_model_name or base
        return about | {"root": root, "parent": parent, "max_model_len": self.service.max_model_len}

    async def health(self, request: Request) -> Response:
        return Response(status_code=200 if self.service.error is None else 503)

    async def ready(self, request: Request) -> Response:
        """Answer 200 if requests are taken; a header names the realm of the answers."""
        status = 503 if self.service.error or self.service.is_draining else 200
        return Response(status_code=status, headers={REALM: self.service.realms.name})

    async def version(self, request: Request) -> Response:
        return json_response({"version": version("duetto")})

    async def metrics(self, request: Request) -> Response:
        return Response(await asyncio.to_thread(self._metrics.text), media_type=CONTENT_TYPE_LATEST)

"""Models, health, version and metrics of a server."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Any, Literal, TypedDict

from prometheus_client import CONTENT_TYPE_LATEST, core
from prometheus_client.metrics_core import Metric as Family
from starlette.requests import Request
from starlette.responses import Response

from ...llm.llm import LLM
from ...llm.metrics import Counter, Gauge, Histogram, Metric, Vector, snapshot
from ..service.errors import json_response
from ..service.exposition import Exposition
from ..service.service import Service
from .body import REALM
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
        return json_response(self._model(self.service.require_model(request.path_params["name"])))

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


# ---------------------------------------------------------------- metrics, under vLLM's names


KINDS = {
    Gauge: core.GaugeMetricFamily,
    Counter: core.CounterMetricFamily,
    Vector: core.CounterMetricFamily,
    Histogram: core.HistogramMetricFamily,
}


def engine_families(llm: LLM, model_name: str) -> Iterator[Family]:
    """Read an engine's metrics; the label `model_name` is the served name."""
    labels = {"model_name": model_name}
    yield from families(snapshot(llm.engine), labels)
    sizes, info = llm.engine.sizes, core.InfoMetricFamily("vllm:cache_config", "Of the KV cache.")
    pages = {"block_size": str(sizes.page_size), "num_gpu_blocks": str(sizes.pages[0])}
    info.add_metric([], labels | {"engine": "0"} | pages)
    yield info


def families(metrics: Iterable[Metric], labels: dict[str, str]) -> Iterable[Family]:
    """Group metrics by their names, with `labels` in addition to their own."""
    found: dict[str, Any] = {}  # families, whose base class has no add_metric
    for metric in metrics:
        name, about = metric.name, metric.name.partition(":")[2].replace("_", " ")
        for own, values in samples(metric):
            own = labels | own
            family = found.setdefault(name, KINDS[type(metric)](name, about, labels=[*own]))
            family.add_metric([*own.values()], *values)
    return found.values()


def samples(metric: Metric) -> Iterator[tuple[dict[str, str], tuple[Any, ...]]]:
    """Yield labels and the arguments of `add_metric` for each sample."""
    match metric:
        case Gauge(value=value) | Counter(value=value):
            yield metric.labels, (value,)
        case Vector(values=values):
            for position, value in enumerate(values):
                yield metric.labels | {"position": str(position)}, (value,)
        case Histogram(sum=total, buckets=buckets):
            yield metric.labels, (list(buckets.items()), total)

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
from ...llm.metrics import Counter, Gauge, Histogram, Metric, Vector, engine_metrics
from ..service.errors import json_response
from ..service.exposition import Exposition
from ..service.service import Service
from .body import REALM_HEADER
from .openapi import ApiRoute


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


class StateRoutes:
    def __init__(self, service: Service):
        self.service, self._start_time = service, int(time.time())
        read = partial(engine_metric_families, service.llm, service.names[0])
        self._metrics = Exposition(read, service.lag.histogram)
        self.routes = [
            ApiRoute("/v1/models", self.list_models, "the served names", reply=Models),
            ApiRoute("/v1/models/{name:path}", self.show_model, "one of them", reply=Model, errors=[404]),
            ApiRoute(
                "/health",
                self.answer_health,
                "whether the engine lives",
                media_type=None,
                errors=[503],
                is_open=True,
            ),
            ApiRoute(
                "/ready",
                self.answer_ready,
                "whether requests are taken",
                media_type=None,
                errors=[503],
                is_open=True,
            ),
            ApiRoute("/version", self.answer_version, "duetto's version", reply=Version),
            ApiRoute(
                "/metrics", self.answer_metrics, "counts and times for Prometheus", media_type="text/plain"
            ),
        ]

    async def list_models(self, request: Request) -> Response:
        names = [*self.service.names, *self.service.adapters]
        return json_response({"object": "list", "data": list(map(self._model_record, names))})

    async def show_model(self, request: Request) -> Response:
        return json_response(self._model_record(self.service.require_model(request.path_params["name"])))

    def _model_record(self, name: str) -> dict[str, object]:
        about = {"id": name, "object": "model", "created": self._start_time, "owned_by": "duetto"}
        base, adapter = self.service.names[0], self.service.adapters.get(name)
        root, parent = base, None
        if adapter is not None:
            root, parent = adapter.lora_path, adapter.base_model_name or base
        return about | {"root": root, "parent": parent, "max_model_len": self.service.max_model_len}

    async def answer_health(self, request: Request) -> Response:
        return Response(status_code=200 if self.service.error is None else 503)

    async def answer_ready(self, request: Request) -> Response:
        """Answer 200 if requests are taken, else 503. A header names the realm of the answers."""
        status = 503 if self.service.error or self.service.is_draining else 200
        return Response(status_code=status, headers={REALM_HEADER: self.service.answer_realm.name})

    async def answer_version(self, request: Request) -> Response:
        return json_response({"version": version("duetto")})

    async def answer_metrics(self, request: Request) -> Response:
        return Response(await asyncio.to_thread(self._metrics.render), media_type=CONTENT_TYPE_LATEST)


# ---------------------------------------------------------------- metrics, under vLLM's names


FAMILY_TYPES = {
    Gauge: core.GaugeMetricFamily,
    Counter: core.CounterMetricFamily,
    Vector: core.CounterMetricFamily,
    Histogram: core.HistogramMetricFamily,
}


def engine_metric_families(llm: LLM, model_name: str) -> Iterator[Family]:
    """Yield an engine's metrics as families of Prometheus. The label `model_name` is the served name."""
    labels = {"model_name": model_name}
    yield from group_metrics(engine_metrics(llm.engine), labels)
    sizes, info = llm.engine.sizes, core.InfoMetricFamily("vllm:cache_config", "Of the KV cache.")
    pages = {"block_size": str(sizes.page_size), "num_gpu_blocks": str(sizes.pages[0])}
    info.add_metric([], labels | {"engine": "0"} | pages)
    yield info


def group_metrics(metrics: Iterable[Metric], labels: dict[str, str]) -> Iterable[Family]:
    """Group metrics into families by name. `labels` are added to each metric's labels."""
    families_by_name: dict[str, Any] = {}  # families, whose base class has no add_metric
    for metric in metrics:
        name, about = metric.name, metric.name.partition(":")[2].replace("_", " ")
        for sample_labels, values in metric_samples(metric):
            sample_labels = labels | sample_labels
            family = families_by_name.setdefault(
                name, FAMILY_TYPES[type(metric)](name, about, labels=[*sample_labels])
            )
            family.add_metric([*sample_labels.values()], *values)
    return families_by_name.values()


def metric_samples(metric: Metric) -> Iterator[tuple[dict[str, str], tuple[Any, ...]]]:
    """Yield the labels of each sample of a metric, and its arguments of `add_metric`."""
    match metric:
        case Gauge(value=value) | Counter(value=value):
            yield metric.labels, (value,)
        case Vector(values=values):
            for position, value in enumerate(values):
                yield metric.labels | {"position": str(position)}, (value,)
        case Histogram(sum=total, buckets=buckets):
            yield metric.labels, (list(buckets.items()), total)

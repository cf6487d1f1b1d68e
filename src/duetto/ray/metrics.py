"""Metrics of an engine as Ray metrics, under the names that Ray's dashboard for LLMs reads."""

import asyncio
from collections import Counter as Totals
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from ..serve.engine.core.engine import Engine
from ..serve.llm.metrics import Counter, Gauge, Metric, engine_metrics

PERIOD_SECONDS = 5.0  # seconds, half of the period at which Ray exports


class RayMetrics:
    """Gauges and counters of Ray, created when they first have a value.

    Histograms are left out: Ray's take single observations only.
    """

    def __init__(self, model_name: str):
        self._kinds, self._model = import_module("ray.serve.metrics"), {"model_name": model_name}
        self._ray_metrics: dict[str, Any] = {}
        self._totals = Totals[tuple[str, str]]()

    def record_metrics(self, metrics: Iterable[Metric]) -> None:
        for metric in metrics:
            match metric:
                case Gauge(value=value):
                    self._ray_metric(self._kinds.Gauge, metric).set(value, tags=metric.labels | self._model)
                case Counter(value=value):
                    self._record_counter(metric, value)

    def _record_counter(self, metric: Metric, value: int) -> None:
        key = metric.name, str(metric.labels)
        if (more := value - self._totals[key]) > 0:
            self._ray_metric(self._kinds.Counter, metric).inc(more, tags=metric.labels | self._model)
            self._totals[key] = value

    def _ray_metric(self, kind: Any, metric: Metric) -> Any:
        name = metric.name.replace(":", "_")
        if name not in self._ray_metrics:
            self._ray_metrics[name] = kind(name, tag_keys=(*metric.labels, *self._model))
        return self._ray_metrics[name]


async def copy_metrics_periodically(engine: Engine, model_name: str) -> None:
    """Copy an engine's metrics to Ray every PERIOD_SECONDS, until cancelled."""
    metrics = RayMetrics(model_name)
    while True:
        metrics.record_metrics(engine_metrics(engine))
        await asyncio.sleep(PERIOD_SECONDS)

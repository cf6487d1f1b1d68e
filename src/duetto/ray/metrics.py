"""Metrics of an engine among those of Ray, under the names that Ray's dashboard for LLMs reads."""

import asyncio
from collections import Counter as Totals
from collections.abc import Iterable
from importlib import import_module
from typing import Any

from ..serve.engine.core.engine import Engine
from ..serve.llm.metrics import Counter, Gauge, Metric, snapshot

PERIOD = 5.0  # seconds, half of the period at which Ray exports


class RayMetrics:
    """Gauges and counters of Ray, made when they first have a value. Histograms are left out: Ray's take only
    single observations."""

    def __init__(self, model_name: str):
        self._kinds, self._model = import_module("ray.serve.metrics"), {"model_name": model_name}
        self._made: dict[str, Any] = {}
        self._totals = Totals[tuple[str, str]]()

    def copy(self, metrics: Iterable[Metric]) -> None:
        for metric in metrics:
            match metric:
                case Gauge(value=value):
                    self._of(self._kinds.Gauge, metric).set(value, tags=metric.labels | self._model)
                case Counter(value=value):
                    self._add(metric, value)

    def _add(self, metric: Metric, value: int) -> None:
        key = metric.name, str(metric.labels)
        if (more := value - self._totals[key]) > 0:
            self._of(self._kinds.Counter, metric).inc(more, tags=metric.labels | self._model)
            self._totals[key] = value

    def _of(self, kind: Any, metric: Metric) -> Any:
        name = metric.name.replace(":", "_")
        if name not in self._made:
            self._made[name] = kind(name, tag_keys=(*metric.labels, *self._model))
        return self._made[name]


async def copied(engine: Engine, model_name: str) -> None:
    """Copy an engine's metrics until cancelled."""
    metrics = RayMetrics(model_name)
    while True:
        metrics.copy(snapshot(engine))
        await asyncio.sleep(PERIOD)

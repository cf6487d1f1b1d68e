"""Metrics for Prometheus: the text of /metrics, and the lag of the event loop. Nothing here imports jax."""

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

LAG_PERIOD_SECONDS = 0.1  # seconds between measurements
LAG_BUCKET_SECONDS = 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5


class Exposition(Collector):
    """Text of /metrics. Each request reads the metric families anew, from `read_families` and the
    `others`."""

    def __init__(self, read_families: Callable[[], Iterable[Metric]], *others: Collector):
        self._read_families, self._registry = read_families, CollectorRegistry()
        for collector in (self, *others):
            self._registry.register(collector)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return ()  # called at the registration, before anything is counted

    def collect(self) -> Iterable[Metric]:
        return self._read_families()


class EventLoopLag:
    """Histogram of the event loop's lag: the seconds by which it misses a due time, so all work waits."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        name, about = "duetto:event_loop_delay_seconds", "how late the event loop is"
        self.histogram = Histogram(name, about, registry=None, buckets=LAG_BUCKET_SECONDS)
        self._loop = loop
        self._schedule_next()

    def _schedule_next(self) -> None:
        self._due = self._loop.time() + LAG_PERIOD_SECONDS
        self._timer = self._loop.call_at(self._due, self._measure)

    def _measure(self) -> None:
        self.histogram.observe(max(self._loop.time() - self._due, 0.0))
        self._schedule_next()

    def close(self) -> None:
        self._timer.cancel()

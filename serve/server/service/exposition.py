"""Metrics for Prometheus: the text of /metrics, and the lag of the event loop. Nothing here imports jax."""

import asyncio
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

PERIOD = 0.1  # seconds between measurements
LIMITS = 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5


class Exposition(Collector):
    """Writes the families that `read` returns, anew at each request, and those of the `others`."""

    def __init__(self, read: Callable[[], Iterable[Metric]], *others: Collector):
        self._read, self._registry = read, CollectorRegistry()
        for collector in (self, *others):
            self._registry.register(collector)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return ()  # called at the registration, before anything is counted

    def collect(self) -> Iterable[Metric]:
        return self._read()


class EventLoopLag:
    """Measures by how many seconds the event loop misses a time that is due: all other work waits as long."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        name, about = "duetto:event_loop_delay_seconds", "how late the event loop is"
        self.histogram = Histogram(name, about, registry=None, buckets=LIMITS)
        self._loop = loop
        self._await_next()

    def _await_next(self) -> None:
        self._due = self._loop.time() + PERIOD
        self._timer = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        self.histogram.observe(max(self._loop.time() - self._due, 0.0))
        self._await_next()

    def close(self) -> None:
        self._timer.cancel()

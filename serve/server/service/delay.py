"""How late the event loop is."""

import asyncio

from prometheus_client import Histogram

PERIOD = 0.1  # seconds between looks
LIMITS = 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5


class EventLoopLag:
    """Notes by how many seconds the loop misses a time that is due: so long whatever else is due waits."""

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

"""/metrics of a router: what it has dealt to each replica."""

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ...kv.routing.placement import Replica
from .proxy import Proxy

CONTENT_TYPE = CONTENT_TYPE_LATEST
COUNTS = {
    "requests": ("requests sent", lambda one: one.chosen),
    "prompt_tokens": ("tokens of their prompts", lambda one: one.prompt_tokens),
    "hit_tokens": ("those that were thought to be cached there", lambda one: one.hit_tokens),
    "lost": ("times that it did not answer", lambda one: one.lost),
}
STATES = {
    "ready": ("whether it takes requests", lambda one: one.is_ready),
    "up": ("whether it answers", lambda one: one.is_up),
    "running": ("requests that it has", lambda one: len(one.jobs)),
    "load": ("what it has to do, in tokens of prefill", lambda one: one.load),
}


class RouterMetrics(Collector):
    """Reads the counts of a router whenever somebody asks."""

    def __init__(self, replicas: Sequence[Replica], proxy: Proxy):
        self._replicas, self._proxy = replicas, proxy
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        for name, (about, value) in COUNTS.items():
            counter = CounterMetricFamily(f"duetto:router_{name}", about, labels=["replica"])
            for one in self._replicas:
                counter.add_metric([str(one)], value(one))
            yield counter
        for name, (about, value) in STATES.items():
            gauge = GaugeMetricFamily(f"duetto:router_replica_{name}", about, labels=["replica"])
            for one in self._replicas:
                gauge.add_metric([str(one)], float(value(one)))
            yield gauge
        yield GaugeMetricFamily("duetto:router_waiting", "requests in line", float(self._proxy.line.waiting))
        yield CounterMetricFamily("duetto:router_resumed", "answers gone on elsewhere", self._proxy.resumed)
        yield CounterMetricFamily("duetto:router_retried", "requests asked again", self._proxy.retried)

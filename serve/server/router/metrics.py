"""The metrics of a router: the work that it has sent to each replica."""

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from ...kv.routing.placement import Replica
from .proxy import Proxy

COUNTS: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "requests": ("requests sent", lambda one: one.chosen),
    "prompt_tokens": ("tokens of their prompts", lambda one: one.prompt_tokens),
    "hit_tokens": ("those that were thought to be cached there", lambda one: one.hit_tokens),
    "lost": ("times that it did not answer", lambda one: one.lost),
}
STATES: dict[str, tuple[str, Callable[[Replica], float]]] = {
    "ready": ("whether it takes requests", lambda one: one.is_ready),
    "up": ("whether it answers", lambda one: one.is_up),
    "running": ("requests that it has", lambda one: len(one.jobs)),
    "load": ("what it has to do, in tokens of prefill", lambda one: one.load),
}
KINDS = (CounterMetricFamily, "router", COUNTS), (GaugeMetricFamily, "router_replica", STATES)


def router_families(replicas: Sequence[Replica], proxy: Proxy) -> Iterator[Metric]:
    """Read the counts of a router and the states of its replicas."""
    for kind, prefix, table in KINDS:
        for name, (about, value) in table.items():
            family = kind(f"duetto:{prefix}_{name}", about, labels=["replica"])
            for one in replicas:
                family.add_metric([str(one)], float(value(one)))
            yield family
    yield GaugeMetricFamily("duetto:router_waiting", "requests in line", float(proxy.line.waiting))
    yield CounterMetricFamily("duetto:router_resumed", "answers gone on elsewhere", proxy.resumed)
    yield CounterMetricFamily("duetto:router_retried", "requests asked again", proxy.retried)

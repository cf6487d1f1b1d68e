"""/metrics: what an engine counts, as Prometheus reads it, under vLLM's names."""

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from ...llm.llm import LLM
from ...llm.metrics import Counter, Gauge, Histogram, Metric, Vector, snapshot

CONTENT_TYPE = CONTENT_TYPE_LATEST


class EngineMetrics(Collector):
    """Reads an engine's counts whenever somebody asks; the label `model_name` is the served name."""

    def __init__(self, llm: LLM, model_name: str, *others: Collector):
        self._llm, self._labels = llm, {"model_name": model_name}
        self._registry = CollectorRegistry()
        for collector in (self, *others):
            self._registry.register(collector)

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Family]:
        return ()  # asked at the registration: names follow from the engine

    def collect(self) -> Iterator[Family]:
        families: dict[str, Family] = {}
        for metric in snapshot(self._llm.engine):
            family = families.setdefault(metric.name, family_of(metric))
            add(family, metric, self._labels | metric.labels)
        yield from families.values()
        yield self._cache()

    def _cache(self) -> Family:
        sizes, info = self._llm.engine.sizes, InfoMetricFamily("vllm:cache_config", "Of the KV cache.")
        pages = {"block_size": str(sizes.page_size), "num_gpu_blocks": str(sizes.pages[0])}
        info.add_metric([], self._labels | {"engine": "0"} | pages)
        return info


def family_of(metric: Metric) -> Family:
    kinds = {Gauge: GaugeMetricFamily, Counter: CounterMetricFamily, Histogram: HistogramMetricFamily}
    kind = kinds.get(type(metric), CounterMetricFamily)
    return kind(metric.name, metric.name.partition(":")[2].replace("_", " "))


def add(family: Family, metric: Metric, labels: dict[str, str]) -> None:
    match metric:
        case Gauge(value=value):
            family.add_sample(family.name, labels, value)
        case Counter(value=value):
            family.add_sample(f"{family.name}_total", labels, value)
        case Vector(values=values):
            for position, value in enumerate(values):
                family.add_sample(f"{family.name}_total", labels | {"position": str(position)}, value)
        case Histogram(count=count, sum=total, buckets=buckets):
            for limit, within in buckets.items():
                family.add_sample(f"{family.name}_bucket", labels | {"le": limit}, within)
            family.add_sample(f"{family.name}_count", labels, count)
            family.add_sample(f"{family.name}_sum", labels, total)

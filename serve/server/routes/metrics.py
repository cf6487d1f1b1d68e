"""The metrics of an engine as Prometheus reads them, under vLLM's names."""

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric as Family

from ...llm.llm import LLM
from ...llm.metrics import Counter, Gauge, Histogram, Metric, Vector, snapshot

KINDS = {
    Gauge: GaugeMetricFamily,
    Counter: CounterMetricFamily,
    Vector: CounterMetricFamily,
    Histogram: HistogramMetricFamily,
}


def engine_families(llm: LLM, model_name: str) -> Iterator[Family]:
    """Read an engine's metrics; the label `model_name` is the served name."""
    labels = {"model_name": model_name}
    yield from families(snapshot(llm.engine), labels)
    sizes, info = llm.engine.sizes, InfoMetricFamily("vllm:cache_config", "Of the KV cache.")
    pages = {"block_size": str(sizes.page_size), "num_gpu_blocks": str(sizes.pages[0])}
    info.add_metric([], labels | {"engine": "0"} | pages)
    yield info


def families(metrics: Iterable[Metric], labels: dict[str, str]) -> Iterable[Family]:
    """Group metrics by their names, with `labels` in addition to their own."""
    found: dict[str, Family] = {}
    for metric in metrics:
        name, about = metric.name, metric.name.removeprefix("vllm:").replace("_", " ")
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

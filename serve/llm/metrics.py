"""Metrics of an engine as the objects that vLLM's `get_metrics` returns, under vLLM's names."""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from ..engine.core.engine import Engine
from ..engine.core.request import Request

LABELS = {"engine": "0"}


@dataclass
class Metric:
    """A measured quantity; `labels` distinguish metrics of one name."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """A current value."""

    value: float


@dataclass
class Vector(Metric):
    """A counter for each position."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """Observations: their number, their sum, and the number up to each upper limit, the last "+Inf"."""

    count: int
    sum: float
    buckets: dict[str, int]


def adapters_of(requests: Iterable[Request]) -> str:
    """Return the names of the adapters of unfinished requests, separated by commas."""
    return ",".join(sorted({r.adapter.name for r in requests if r.adapter and not r.finished}))


def snapshot(engine: Engine) -> list[Metric]:
    """Return all metrics of an engine now."""
    return [*gauges(engine), *counters(engine), *speculation(engine), *histograms(engine)]


def gauges(engine: Engine) -> Iterator[Gauge]:
    scheduler = engine.scheduler
    running = list(scheduler.running.values())
    waiting = [request for _, request in scheduler.waiting if not request.finished]
    yield Gauge("vllm:num_requests_running", dict(LABELS), float(len(running)))
    yield Gauge("vllm:num_requests_waiting", dict(LABELS), float(len(waiting)))
    tokens = sum(len(request.tokens) for request in running + waiting)
    yield Gauge("duetto:tokens_in_flight", dict(LABELS), float(tokens))
    yield Gauge("vllm:kv_cache_usage_perc", dict(LABELS), engine.tables.occupancy)
    for name, check in engine.kernels.items():
        yield Gauge("duetto:kernel_used", LABELS | {"kernel": name}, float(not check.reason))
    if most := scheduler.places.count:
        named = {
            "max_lora": str(most),
            "running_lora_adapters": adapters_of(running),
            "waiting_lora_adapters": adapters_of(waiting),
        }
        yield Gauge("vllm:lora_requests_info", LABELS | named, time.time())


def counters(engine: Engine) -> Iterator[Counter]:
    meter = engine.meter
    values = {
        "vllm:num_preemptions": engine.scheduler.preemptions,
        "vllm:prompt_tokens": meter.prompt_tokens,
        "vllm:generation_tokens": meter.generated_tokens,
        "vllm:prefix_cache_queries": meter.prompt_tokens,
        "vllm:prefix_cache_hits": meter.cached_tokens,
    }
    yield from (Counter(name, dict(LABELS), value) for name, value in values.items())
    for reason in ("stop", "length", "abort"):
        count = meter.finish_reasons.get(reason, 0)
        yield Counter("vllm:request_success", {**LABELS, "finished_reason": reason}, count)
    for reason, steps in engine.scheduler.reasons.report().items():
        yield Counter("duetto:waiting_reasons", {**LABELS, "reason": reason}, steps)


def speculation(engine: Engine) -> Iterator[Metric]:
    if (found := engine.speculation) is None:
        return
    values = {"drafts": found.passes, "draft_tokens": found.drafted, "accepted_tokens": sum(found.right)}
    for name, value in values.items():
        yield Counter(f"vllm:spec_decode_num_{name}", dict(LABELS), value)
    yield Vector("vllm:spec_decode_num_accepted_tokens_per_pos", dict(LABELS), list(found.right))


def histograms(engine: Engine) -> Iterator[Histogram]:
    for name, found in engine.meter.distributions.found.items():
        limits, within = [*map(str, found.limits), "+Inf"], accumulate(found.counts)
        buckets = dict(zip(limits, within, strict=True))
        yield Histogram(f"vllm:{name}", dict(LABELS), sum(found.counts), found.total, buckets)

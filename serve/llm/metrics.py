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
    """Observations: their number, their sum, and the number up to each upper limit (the last is "+Inf")."""

    count: int
    sum: float
    buckets: dict[str, int]


def join_adapter_names(requests: Iterable[Request]) -> str:
    """Return the names of the adapters of unfinished requests, separated by commas."""
    return ",".join(sorted({r.adapter.name for r in requests if r.adapter and not r.is_finished}))


def engine_metrics(engine: Engine) -> list[Metric]:
    """Return all metrics of an engine now."""
    return [
        *engine_gauges(engine),
        *engine_counters(engine),
        *speculation_metrics(engine),
        *engine_histograms(engine),
    ]


def engine_gauges(engine: Engine) -> Iterator[Gauge]:
    scheduler = engine.scheduler
    running = list(scheduler.running.values())
    waiting = [request for _, request in scheduler.waiting if not request.is_finished]
    yield Gauge("vllm:num_requests_running", dict(LABELS), float(len(running)))
    yield Gauge("vllm:num_requests_waiting", dict(LABELS), float(len(waiting)))
    tokens = sum(len(request.tokens) for request in running + waiting)
    yield Gauge("duetto:tokens_in_flight", dict(LABELS), float(tokens))
    yield Gauge("vllm:kv_cache_usage_perc", dict(LABELS), engine.tables.occupancy)
    for name, check in engine.kernels.items():
        yield Gauge("duetto:kernel_used", LABELS | {"kernel": name}, float(not check.reason))
    if max_lora := scheduler.lora_slots.count:
        adapter_labels = {
            "max_lora": str(max_lora),
            "running_lora_adapters": join_adapter_names(running),
            "waiting_lora_adapters": join_adapter_names(waiting),
        }
        yield Gauge("vllm:lora_requests_info", LABELS | adapter_labels, time.time())


def engine_counters(engine: Engine) -> Iterator[Counter]:
    stats = engine.stats
    values = {
        "vllm:num_preemptions": engine.scheduler.preemptions,
        "vllm:prompt_tokens": stats.prompt_tokens,
        "vllm:generation_tokens": stats.generated_tokens,
        "vllm:prefix_cache_queries": stats.prompt_tokens,
        "vllm:prefix_cache_hits": stats.cached_tokens,
        "vllm:corrupted_requests": stats.finish_reasons.get("error", 0),
    }
    yield from (Counter(name, dict(LABELS), value) for name, value in values.items())
    for reason in ("stop", "length", "abort", "error"):
        count = stats.finish_reasons.get(reason, 0)
        yield Counter("vllm:request_success", {**LABELS, "finished_reason": reason}, count)
    for reason, steps in engine.scheduler.waiting_reasons.report().items():
        yield Counter("duetto:waiting_reasons", {**LABELS, "reason": reason}, steps)


def speculation_metrics(engine: Engine) -> Iterator[Metric]:
    if (stats := engine.speculation) is None:
        return
    values = {"drafts": stats.passes, "draft_tokens": stats.drafted, "accepted_tokens": sum(stats.right)}
    for name, value in values.items():
        yield Counter(f"vllm:spec_decode_num_{name}", dict(LABELS), value)
    yield Vector("vllm:spec_decode_num_accepted_tokens_per_pos", dict(LABELS), list(stats.right))


def engine_histograms(engine: Engine) -> Iterator[Histogram]:
    for name, distribution in engine.stats.distributions.by_name.items():
        limits, cumulative_counts = [*map(str, distribution.limits), "+Inf"], accumulate(distribution.counts)
        buckets = dict(zip(limits, cumulative_counts, strict=True))
        yield Histogram(f"vllm:{name}", dict(LABELS), sum(distribution.counts), distribution.total, buckets)

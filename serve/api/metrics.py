"""What an engine counts, as the metric objects that vLLM's `get_metrics` gives, under vLLM's names."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..outputs import RequestMetrics

if TYPE_CHECKING:
    from ..engine.engine import Engine

LABELS = {"engine": "0"}


@dataclass
class Metric:
    """A measured quantity; `labels` tell apart those of one name."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclass
class Gauge(Metric):
    """A number as it is now."""

    value: float


@dataclass
class Vector(Metric):
    """A counter for each place in an order."""

    values: list[int]


@dataclass
class Histogram(Metric):
    """The number of observations, their sum, and by upper limit, the last "+Inf", how many are within."""

    count: int
    sum: float
    buckets: dict[str, int]


SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
FINE = (0.001, 0.0025, 0.005, *SECONDS)
TOKENS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


@dataclass
class Distribution:
    """A histogram in the making: constant memory, however many observations there are."""

    limits: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self):
        self.counts = [0] * (len(self.limits) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.limits, value)] += 1
        self.total += value

    def histogram(self, name: str) -> Histogram:
        names, buckets, seen = [*map(str, self.limits), "+Inf"], {}, 0
        for limit, count in zip(names, self.counts, strict=True):
            buckets[limit] = seen = seen + count
        return Histogram(name, dict(LABELS), seen, self.total, buckets)


def distributions() -> dict[str, Distribution]:
    return {
        "vllm:request_prompt_tokens": Distribution(TOKENS),
        "vllm:request_generation_tokens": Distribution(TOKENS),
        "vllm:request_queue_time_seconds": Distribution(SECONDS),
        "vllm:time_to_first_token_seconds": Distribution(FINE),
        "vllm:request_time_per_output_token_seconds": Distribution(FINE),
        "vllm:request_decode_time_seconds": Distribution(SECONDS),
        "vllm:e2e_request_latency_seconds": Distribution(SECONDS),
    }


@dataclass
class Finished:
    """Distributions over the requests that have finished."""

    found: dict[str, Distribution] = field(default_factory=distributions)

    def observe(self, prompt_tokens: int, metrics: RequestMetrics) -> None:
        generated = metrics.num_generation_tokens
        self.found["vllm:request_prompt_tokens"].observe(prompt_tokens)
        self.found["vllm:request_generation_tokens"].observe(generated)
        self.found["vllm:request_queue_time_seconds"].observe(metrics.queued)
        self.found["vllm:e2e_request_latency_seconds"].observe(metrics.e2e)
        if generated > 0:
            self.found["vllm:time_to_first_token_seconds"].observe(metrics.ttft)
            self.found["vllm:request_decode_time_seconds"].observe(
                metrics.last_token_ts - metrics.first_token_ts
            )
        if generated > 1:
            self.found["vllm:request_time_per_output_token_seconds"].observe(metrics.tpot)


def snapshot(engine: "Engine") -> list[Metric]:
    """All that is known of an engine now."""
    return [*gauges(engine), *counters(engine), *guesses(engine), *histograms(engine)]


def gauges(engine: "Engine") -> Iterator[Gauge]:
    scheduler = engine.scheduler
    waiting = sum(not request.finished for _, request in scheduler.waiting)
    yield Gauge("vllm:num_requests_running", dict(LABELS), float(len(scheduler.running)))
    yield Gauge("vllm:num_requests_waiting", dict(LABELS), float(waiting))
    yield Gauge("vllm:kv_cache_usage_perc", dict(LABELS), engine.tables.occupancy)


def counters(engine: "Engine") -> Iterator[Counter]:
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


def guesses(engine: "Engine") -> Iterator[Metric]:
    if (found := engine.speculation) is None:
        return
    values = {"drafts": found.passes, "draft_tokens": found.drafted, "accepted_tokens": sum(found.right)}
    for name, value in values.items():
        yield Counter(f"vllm:spec_decode_num_{name}", dict(LABELS), value)
    yield Vector("vllm:spec_decode_num_accepted_tokens_per_pos", dict(LABELS), list(found.right))


def histograms(engine: "Engine") -> Iterator[Histogram]:
    for name, distribution in engine.meter.over_finished.found.items():
        yield distribution.histogram(name)

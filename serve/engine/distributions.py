"""Distributions over the requests that have finished, in constant memory however many there are."""

from bisect import bisect_left
from dataclasses import dataclass, field

from ..outputs import RequestMetrics

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


def distributions() -> dict[str, Distribution]:
    return {
        "request_prompt_tokens": Distribution(TOKENS),
        "request_generation_tokens": Distribution(TOKENS),
        "request_queue_time_seconds": Distribution(SECONDS),
        "time_to_first_token_seconds": Distribution(FINE),
        "request_time_per_output_token_seconds": Distribution(FINE),
        "request_decode_time_seconds": Distribution(SECONDS),
        "e2e_request_latency_seconds": Distribution(SECONDS),
    }


@dataclass
class Finished:
    """Distributions over the requests that have finished."""

    found: dict[str, Distribution] = field(default_factory=distributions)

    def observe(self, prompt_tokens: int, metrics: RequestMetrics) -> None:
        generated = metrics.num_generation_tokens
        self.found["request_prompt_tokens"].observe(prompt_tokens)
        self.found["request_generation_tokens"].observe(generated)
        self.found["request_queue_time_seconds"].observe(metrics.queued)
        self.found["e2e_request_latency_seconds"].observe(metrics.e2e)
        if generated > 0:
            self.found["time_to_first_token_seconds"].observe(metrics.ttft)
            self.found["request_decode_time_seconds"].observe(metrics.last_token_ts - metrics.first_token_ts)
        if generated > 1:
            self.found["request_time_per_output_token_seconds"].observe(metrics.tpot)

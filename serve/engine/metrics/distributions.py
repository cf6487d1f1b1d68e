"""Distributions over steps, arrivals of tokens, and requests, in constant memory however many there are."""

from bisect import bisect_left
from dataclasses import dataclass, field

from ...text.outputs import RequestMetrics
from ..core.request import RequestTimes

# Limits are vLLM's, which alerts may name, and smaller ones, for small models.
WHOLE = (
    0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
FIRST = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
BETWEEN = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
STEP = (1.0, *(float(2**e) for e in range(3, 15)))
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
        "iteration_tokens_total": Distribution(STEP),
        "time_to_first_token_seconds": Distribution(FIRST),
        "inter_token_latency_seconds": Distribution(BETWEEN),
        "request_prompt_tokens": Distribution(TOKENS),
        "request_generation_tokens": Distribution(TOKENS),
        "request_queue_time_seconds": Distribution(WHOLE),
        "request_prefill_time_seconds": Distribution(WHOLE),
        "request_decode_time_seconds": Distribution(WHOLE),
        "request_inference_time_seconds": Distribution(WHOLE),
        "request_time_per_output_token_seconds": Distribution(BETWEEN),
        "e2e_request_latency_seconds": Distribution(WHOLE),
    }


@dataclass
class Distributions:
    """Observations of steps, of arrivals of each request's tokens, and of finished requests; names and
    meaning are vLLM's."""

    found: dict[str, Distribution] = field(default_factory=distributions)

    def step(self, tokens: int) -> None:
        """Observe a step by the tokens of prompts and outputs that it computed."""
        self.found["iteration_tokens_total"].observe(tokens)

    def arrival(self, clock: RequestTimes) -> None:
        """Observe the arrival of one or several tokens of a request."""
        if clock.seen:
            self.found["inter_token_latency_seconds"].observe(clock.last_token - clock.seen)
        else:
            self.found["time_to_first_token_seconds"].observe(clock.first_token - clock.arrival)
        clock.seen = clock.last_token

    def finished(self, prompt_tokens: int, metrics: RequestMetrics) -> None:
        generated = metrics.num_generation_tokens
        self.found["request_prompt_tokens"].observe(prompt_tokens)
        self.found["request_generation_tokens"].observe(generated)
        self.found["request_queue_time_seconds"].observe(metrics.queued)
        self.found["e2e_request_latency_seconds"].observe(metrics.e2e)
        if generated > 0:
            first, last = metrics.first_token_ts, metrics.last_token_ts
            self.found["request_prefill_time_seconds"].observe(first - metrics.scheduled_ts)
            self.found["request_decode_time_seconds"].observe(last - first)
            self.found["request_inference_time_seconds"].observe(last - metrics.scheduled_ts)
        if generated > 1:
            self.found["request_time_per_output_token_seconds"].observe(metrics.tpot)

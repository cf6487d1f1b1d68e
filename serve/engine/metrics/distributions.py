"""Histograms over steps, arrivals of tokens, and requests, in constant memory."""

from bisect import bisect_left
from dataclasses import dataclass, field

from ...text.outputs import RequestMetrics
from ..core.request import RequestTimes

# Limits of buckets, in seconds or tokens: vLLM's, which alerts may name, and smaller ones for small models.
REQUEST_SECONDS_BUCKETS = (
    0.01, 0.025, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0,
    120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
FIRST_TOKEN_SECONDS_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
INTER_TOKEN_SECONDS_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
STEP_TOKENS_BUCKETS = (1.0, *(float(2**e) for e in range(3, 15)))
REQUEST_TOKENS_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))


@dataclass
class Distribution:
    """A histogram.

    limits: upper limits of the buckets; one more bucket has no limit.
    counts: observations in each bucket.
    total: sum of the observed values.
    """

    limits: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self):
        self.counts = [0] * (len(self.limits) + 1)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.limits, value)] += 1
        self.total += value


def make_distributions() -> dict[str, Distribution]:
    return {
        "iteration_tokens_total": Distribution(STEP_TOKENS_BUCKETS),
        "time_to_first_token_seconds": Distribution(FIRST_TOKEN_SECONDS_BUCKETS),
        "inter_token_latency_seconds": Distribution(INTER_TOKEN_SECONDS_BUCKETS),
        "request_prompt_tokens": Distribution(REQUEST_TOKENS_BUCKETS),
        "request_generation_tokens": Distribution(REQUEST_TOKENS_BUCKETS),
        "request_queue_time_seconds": Distribution(REQUEST_SECONDS_BUCKETS),
        "request_prefill_time_seconds": Distribution(REQUEST_SECONDS_BUCKETS),
        "request_decode_time_seconds": Distribution(REQUEST_SECONDS_BUCKETS),
        "request_inference_time_seconds": Distribution(REQUEST_SECONDS_BUCKETS),
        "request_time_per_output_token_seconds": Distribution(INTER_TOKEN_SECONDS_BUCKETS),
        "e2e_request_latency_seconds": Distribution(REQUEST_SECONDS_BUCKETS),
    }


@dataclass
class Distributions:
    """Observations of steps, of arrivals of each request's tokens, and of finished requests; names and
    meaning are vLLM's."""

    by_name: dict[str, Distribution] = field(default_factory=make_distributions)

    def observe_step(self, tokens: int) -> None:
        """Observe a step by the tokens of prompts and outputs that it computed."""
        self.by_name["iteration_tokens_total"].observe(tokens)

    def observe_token_arrival(self, times: RequestTimes) -> None:
        """Observe the arrival of one or several tokens of a request."""
        if times.last_observed_token:
            self.by_name["inter_token_latency_seconds"].observe(times.last_token - times.last_observed_token)
        else:
            self.by_name["time_to_first_token_seconds"].observe(times.first_token - times.arrival)
        times.last_observed_token = times.last_token

    def observe_finish(self, prompt_tokens: int, metrics: RequestMetrics) -> None:
        """Observe a finished request, with `prompt_tokens` tokens in its prompt."""
        generated = metrics.num_generation_tokens
        self.by_name["request_prompt_tokens"].observe(prompt_tokens)
        self.by_name["request_generation_tokens"].observe(generated)
        self.by_name["request_queue_time_seconds"].observe(metrics.queued)
        self.by_name["e2e_request_latency_seconds"].observe(metrics.e2e)
        if generated > 0:
            first, last = metrics.first_token_ts, metrics.last_token_ts
            self.by_name["request_prefill_time_seconds"].observe(first - metrics.scheduled_ts)
            self.by_name["request_decode_time_seconds"].observe(last - first)
            self.by_name["request_inference_time_seconds"].observe(last - metrics.scheduled_ts)
        if generated > 1:
            self.by_name["request_time_per_output_token_seconds"].observe(metrics.tpot)

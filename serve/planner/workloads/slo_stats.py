"""Statistics of a workload's requests, and the limits that each should keep."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...engine.core.request import Request
from ...engine.metrics.stats import Sample

LATENCY_NAMES = "queued", "ttft", "tpot", "e2e"


class SLO(NamedTuple):
    """Limits of requests.

    ttft: seconds to the first token.
    tpot: seconds between tokens, on average.
    """

    ttft: float = math.inf
    tpot: float = math.inf

    def is_met(self, ttft: float, tpot: float) -> bool:
        """Tell if a request with these seconds keeps both limits."""
        return ttft <= self.ttft and tpot <= self.tpot


NO_LIMITS = SLO()


@dataclass
class SLOStats:
    """Statistics of the requests so far; their memory is bounded.

    slo: limits of each request.
    max_late: requests that may miss the limits until the rest is hopeless.
    finished: number that ended.
    in_time: number that kept the limits.
    too_long: number that were too long.
    first_arrival: seconds of the first arrival.
    last_end: seconds of the last end.
    latencies: samples of each latency, in seconds.
    """

    slo: SLO
    max_late: float = math.inf
    finished: int = 0
    in_time: int = 0
    too_long: int = 0
    first_arrival: float = math.inf
    last_end: float = 0.0
    latencies: dict[str, Sample] = field(default_factory=lambda: {name: Sample() for name in LATENCY_NAMES})

    def __call__(self, request: Request) -> None:
        """Record a request that has ended."""
        m = request.metrics()
        self.finished += 1
        self.in_time += self.slo.is_met(m.ttft, m.tpot)
        self.first_arrival, self.last_end = (
            min(self.first_arrival, m.arrival),
            max(self.last_end, m.arrival + m.e2e),
        )
        for name, seconds in zip(LATENCY_NAMES, (m.queued, m.ttft, m.tpot, m.e2e), strict=True):
            if seconds > 0 or name != "tpot":  # a single token has no TPOT
                self.latencies[name].add(seconds)

    @property
    def num_late(self) -> int:
        """Return the number of requests that missed the limits or were too long."""
        return self.finished - self.in_time + self.too_long

    @property
    def is_hopeless(self) -> bool:
        return self.num_late > self.max_late

    @property
    def duration_seconds(self) -> float:
        return max(self.last_end - self.first_arrival, 1e-9)

    def report(self) -> dict[str, Any]:
        """Return the statistics as plain numbers."""
        return {
            "requests": self.finished,
            "left_out": self.too_long,
            "seconds": self.duration_seconds,
            "in_time": self.in_time / max(self.finished + self.too_long, 1),
            "goodput": self.in_time / self.duration_seconds,
        } | {name: sample.percentiles() for name, sample in self.latencies.items()}

"""Statistics of a workload's requests, by the limits that they are to keep."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ...engine.core.request import Request
from ...engine.metrics.meter import Sample

SPANS = "queued", "ttft", "tpot", "e2e"


class SLO(NamedTuple):
    """Limits of requests.

    ttft: seconds to the first token.
    tpot: seconds between tokens, on average.
    """

    ttft: float = math.inf
    tpot: float = math.inf

    def kept(self, ttft: float, tpot: float) -> bool:
        return ttft <= self.ttft and tpot <= self.tpot


ANY = SLO()


@dataclass
class SLOStats:
    """The requests so far: those that ended, in time or not, and those that were too long. More than
    `most_late` that are not in time make the rest hopeless. Its memory is bounded."""

    within: SLO
    most_late: float = math.inf
    ended: int = 0
    in_time: int = 0
    left_out: int = 0
    first: float = math.inf  # arrival
    last: float = 0.0  # end
    spans: dict[str, Sample] = field(default_factory=lambda: {name: Sample() for name in SPANS})

    def __call__(self, request: Request) -> None:
        m = request.metrics()
        self.ended += 1
        self.in_time += self.within.kept(m.ttft, m.tpot)
        self.first, self.last = min(self.first, m.arrival), max(self.last, m.arrival + m.e2e)
        for name, seconds in zip(SPANS, (m.queued, m.ttft, m.tpot, m.e2e), strict=True):
            if seconds > 0 or name != "tpot":  # of a lone token there is none
                self.spans[name].add(seconds)

    @property
    def late(self) -> int:
        return self.ended - self.in_time + self.left_out

    @property
    def is_hopeless(self) -> bool:
        return self.late > self.most_late

    @property
    def seconds(self) -> float:
        return max(self.last - self.first, 1e-9)

    def report(self) -> dict[str, Any]:
        """As plain numbers."""
        return {
            "requests": self.ended,
            "left_out": self.left_out,
            "seconds": self.seconds,
            "in_time": self.in_time / max(self.ended + self.left_out, 1),
            "goodput": self.in_time / self.seconds,
        } | {name: sample.percentiles() for name, sample in self.spans.items()}

"""Time that passes only where something takes time: a clock, and the stages of a device that work side by
side."""

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class SimulatedClock:
    """Seconds since the start of a simulation; called, it says what time it is."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds

    def wait_until(self, moment: float) -> None:
        """Nothing happens before a moment, unless it has passed."""
        self.seconds = max(self.seconds, moment)

    def spend(self, seconds: float) -> None:
        self.seconds += seconds


@dataclass
class SimulatedStages:
    """Stages one behind the other, each of which does one call at a time, in the order in which they come
    (as `serve/runtime/pipeline/` has it). A device without a pipeline is one stage."""

    count: int
    free: list[float] = field(default_factory=list)  # from when on each has nothing to do
    busy: float = 0.0  # seconds of all stages
    open: float = 0.0  # seconds in which a call was on its way

    def __post_init__(self):
        self.free = [0.0] * self.count

    def run(self, moment: float, seconds: Sequence[float]) -> float:
        """When a call that may begin at a moment, and takes so many seconds in each stage, has left the
        last."""
        begun, last = max(moment, self.free[0]), self.free[-1]
        for stage, own in enumerate(seconds):
            moment = self.free[stage] = max(moment, self.free[stage]) + own
            self.busy += own
        self.open += moment - max(begun, last)
        return moment

    @property
    def bubbles(self) -> float:
        """The share of their time in which stages had nothing to do while a call was on its way."""
        return 1 - self.busy / (self.count * self.open) if self.open else 0.0

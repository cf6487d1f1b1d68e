"""A simulated device: a clock that advances only by the seconds that calls take, stages that work side by
side, and programs that compute nothing. The tokens that rows sample mean nothing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from ....model.pair import PairConfig
from ....sampling.params import NO_TOKEN
from ....sampling.sample import Sampled
from ...engine.core.plan import ScheduledTokens
from ...runtime.compiled.compile import StepArguments
from ...runtime.compiled.shapes import Shape, Sizes
from ...runtime.programs import NullPrograms
from ...runtime.steps.step import Output, Seat
from .times import StepCall, StepTimes

TOKEN = 0  # that every row samples


@dataclass
class SimulatedClock:
    """Seconds since the start of a simulation, returned when called."""

    seconds: float = 0.0

    def __call__(self) -> float:
        return self.seconds

    def wait_until(self, moment: float) -> None:
        """Advance to a moment, unless it has passed."""
        self.seconds = max(self.seconds, moment)

    def spend(self, seconds: float) -> None:
        self.seconds += seconds


@dataclass
class SimulatedStages:
    """Stages one after the other. Each does one call at a time, in order of arrival, as in
    `serve/runtime/pipeline/`. A device without a pipeline is one stage."""

    count: int
    free: list[float] = field(default_factory=list)  # from when on each has nothing to do
    busy: float = 0.0  # seconds of all stages
    open: float = 0.0  # seconds in which a call was on its way

    def __post_init__(self):
        self.free = [0.0] * self.count

    def run(self, moment: float, seconds: Sequence[float]) -> float:
        """Return when a call that may begin at a moment, and takes `seconds[i]` in stage i, leaves the last
        stage."""
        begun, last = max(moment, self.free[0]), self.free[-1]
        for stage, own in enumerate(seconds):
            moment = self.free[stage] = max(moment, self.free[stage]) + own
            self.busy += own
        self.open += moment - max(begun, last)
        return moment

    @property
    def bubbles(self) -> float:
        """Share of the stages' time without work while a call is on its way."""
        return 1 - self.busy / (self.count * self.open) if self.open else 0.0


@dataclass(frozen=True)
class SimulatedResult:
    """Future of the output of a call, which arrives `at` a simulated time."""

    output: Output
    at: float
    clock: SimulatedClock

    def arrived(self) -> Output:
        self.clock.wait_until(self.at)
        return self.output


class SimulatedPrograms(NullPrograms):
    """Programs on `SimulatedStages`: each call takes the time that a model of time gives.

    acceptance: probability that a draft token is right, if those before it are. inline: calls run on the
    thread that dispatches them, as on a CPU. seating: seconds of host work for each admitted request.
    """

    def __init__(
        self,
        config: PairConfig,
        sizes: Sizes,
        times: StepTimes,
        clock: SimulatedClock,
        acceptance: float = 0.0,
        inline: bool = False,
        seating: float = 0.0,
    ):
        super().__init__(config, sizes)
        self.times, self.clock = times, clock
        self.stages = SimulatedStages(times.stages)
        self._acceptance, self._random, self._inline = acceptance, Random(0), inline
        self._seating = seating
        self._known: dict[int, int] = {}  # by slots, tokens that were known at admission
        self._left: dict[int, float] = {}  # by slots, when their last step has left the last stage

    def report(self) -> dict[str, Any]:
        return {"bubbles": self.stages.bubbles}

    def seat(self, slots: Any, slot: np.int32, new: Seat) -> Any:
        self._known[int(slot)] = int(new.known)
        self.clock.spend(self._seating)
        return slots

    def batch(self, shape: Shape, rows: Mapping[int, Any]) -> Mapping[int, Any]:
        return rows

    def run(
        self, shape: Shape, arguments: StepArguments, works: Mapping[int, ScheduledTokens]
    ) -> tuple[Any, Any, SimulatedResult]:
        """Run a call. It begins once it is dispatched, its rows' last steps have left the last stage, and the
        calls before it the first."""
        tokens, cached = sum(w.count for w in works.values()), sum(w.start for w in works.values())
        call, seats = StepCall(shape, len(works), tokens, cached), [_seat(work) for work in works.values()]
        coming = self.coming(shape, works, self.dispatch(call, seats))
        return arguments.cache, arguments.slots, coming

    def coming(self, shape: Shape, works: Mapping[int, ScheduledTokens], at: float) -> SimulatedResult:
        """Return what the rows of a call have sampled, as a future."""
        columns = 1 if shape.phase == "prefill" else shape.tokens
        sampled = np.full((self.sizes.shards * shape.rows, columns), NO_TOKEN, np.int32)
        for row, work in works.items():
            first, end = self._sampled(shape, work, self._known[_seat(work)])
            sampled[row, first:end] = TOKEN
        return SimulatedResult(Output(Sampled(sampled, None, None, None, None), None), at, self.clock)

    def dispatch(self, call: StepCall, seats: Iterable[int] = ()) -> float:
        """Return the time at which the results of a call for some slots, dispatched now, arrive."""
        moment = self.clock()
        if self.stages.count > 1:
            moment = max([moment, *(self._left.get(seat, 0.0) for seat in seats)])
        left = self.stages.run(moment, self.times(call))
        if self.stages.count > 1:
            self._left.update(dict.fromkeys(seats, left))
        if self._inline:
            self.clock.wait_until(left)
        return left

    def _sampled(self, shape: Shape, work: ScheduledTokens, known: int) -> tuple[int, int]:
        """Return the columns in which a row samples: behind the last of its known tokens."""
        if shape.phase == "prefill":
            return 0, int(work.start + work.count >= known)
        if shape.phase == "verify":
            if work.start + 1 < known:
                return 0, 0
            wrong = (i for i in range(1, work.count) if self._random.random() >= self._acceptance)
            return 0, next(wrong, work.count)
        return min(max(known - 1 - work.start, 0), work.count), work.count


def _seat(work: ScheduledTokens) -> int:
    assert work.request.slot is not None
    return work.request.slot

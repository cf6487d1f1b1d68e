"""A simulated device. Its clock advances only by the seconds that calls take, its stages work in parallel,
and its programs compute nothing. The tokens that rows sample mean nothing."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from ....model.draft_pair import PairConfig
from ....sampling.params import NO_TOKEN
from ....sampling.sample import Sampled
from ...engine.core.scheduler_output import ScheduledTokens
from ...runtime.compiled.lowering import StepArguments
from ...runtime.compiled.shapes import Shape, Sizes
from ...runtime.executor import NullExecutor
from ...runtime.steps.output import NO_PROMPT_INPUTS, Output, PromptInputs
from ...runtime.steps.step import SlotContents
from .step_times import StepCall, StepTimes

SAMPLED_TOKEN = 0  # id that every row samples


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
        """Advance by some seconds."""
        self.seconds += seconds


@dataclass
class SimulatedStages:
    """Pipeline stages. Each runs one call at a time, in order of arrival, as in `serve/runtime/pipeline/`. A
    device without a pipeline is one stage.

    count: number of stages.
    free_times: moment from which each stage has no work.
    busy_seconds: seconds of work of all stages.
    in_flight_seconds: seconds in which any call was in flight.
    """

    count: int
    free_times: list[float] = field(default_factory=list)
    busy_seconds: float = 0.0
    in_flight_seconds: float = 0.0

    def __post_init__(self):
        self.free_times = [0.0] * self.count

    def run(self, moment: float, seconds: Sequence[float]) -> float:
        """Return the moment when a call leaves the last stage. It may begin at `moment`, and takes
        `seconds[i]` in stage i."""
        start_time, last = max(moment, self.free_times[0]), self.free_times[-1]
        for stage, stage_seconds in enumerate(seconds):
            moment = self.free_times[stage] = max(moment, self.free_times[stage]) + stage_seconds
            self.busy_seconds += stage_seconds
        self.in_flight_seconds += moment - max(start_time, last)
        return moment

    @property
    def bubbles(self) -> float:
        """Return the share of the stages' time without work while a call is in flight."""
        return (
            1 - self.busy_seconds / (self.count * self.in_flight_seconds) if self.in_flight_seconds else 0.0
        )


@dataclass(frozen=True)
class SimulatedResult:
    """Future of a call's output.

    arrival: simulated moment of its arrival.
    """

    output: Output
    arrival: float
    clock: SimulatedClock

    def wait_result(self) -> Output:
        """Advance the clock to the arrival, and return the output."""
        self.clock.wait_until(self.arrival)
        return self.output


class SimulatedExecutor(NullExecutor):
    """Executor on `SimulatedStages`. Each call takes the seconds of a model of time.

    acceptance: probability that a draft token is right, if the draft tokens before it are.
    inline: True if calls run on the thread that dispatches them, as on a CPU.
    slot_seconds: seconds of host work for each admitted request.
    """

    def __init__(
        self,
        config: PairConfig,
        sizes: Sizes,
        times: StepTimes,
        clock: SimulatedClock,
        acceptance: float = 0.0,
        inline: bool = False,
        slot_seconds: float = 0.0,
    ):
        super().__init__(config, sizes)
        self.times, self.clock = times, clock
        self.stages = SimulatedStages(times.num_stages)
        self._acceptance, self._random, self._inline = acceptance, Random(0), inline
        self._slot_seconds = slot_seconds
        self._known_tokens: dict[int, int] = {}  # tokens known at admission, by slot
        self._end_times: dict[int, float] = {}  # moment when the last step left the last stage, by slot

    def report(self) -> dict[str, Any]:
        return {"bubbles": self.stages.bubbles}

    def assign_slot(self, slots: Any, slot: np.int32, contents: SlotContents) -> Any:
        self._known_tokens[int(slot)] = int(contents.known)
        self.clock.spend(self._slot_seconds)
        return slots

    def run(
        self,
        shape: Shape,
        arguments: StepArguments,
        scheduled: Mapping[int, ScheduledTokens],
        prompt_inputs: PromptInputs = NO_PROMPT_INPUTS,
    ) -> tuple[Any, Any, SimulatedResult]:
        """Run a call. It begins once it is dispatched. Its rows' last steps must have left the last stage,
        and earlier calls the first stage."""
        tokens, cached = sum(w.count for w in scheduled.values()), sum(w.start for w in scheduled.values())
        call, slots = (
            StepCall(shape, len(scheduled), tokens, cached),
            [_slot_of_row(work) for work in scheduled.values()],
        )
        result = SimulatedResult(
            self._sample_tokens(shape, scheduled), self._dispatch(call, slots), self.clock
        )
        return arguments.cache, arguments.slots, result

    def _sample_tokens(self, shape: Shape, scheduled: Mapping[int, ScheduledTokens]) -> Output:
        """Return the tokens that the rows of a call sample."""
        columns = 1 if shape.phase == "prefill" else shape.tokens
        sampled = np.full((self.sizes.shards * shape.rows, columns), NO_TOKEN, np.int32)
        for row, scheduled_row in scheduled.items():
            first, end = self._sampled_columns(
                shape, scheduled_row, self._known_tokens[_slot_of_row(scheduled_row)]
            )
            sampled[row, first:end] = SAMPLED_TOKEN
        return Output(Sampled(sampled, None, None, None, None), None)

    def _dispatch(self, call: StepCall, slots: Iterable[int]) -> float:
        """Dispatch a call for some slots, and return the moment when its results arrive."""
        moment = self.clock()
        if self.stages.count > 1:
            moment = max([moment, *(self._end_times.get(slot, 0.0) for slot in slots)])
        end = self.stages.run(moment, self.times(call))
        if self.stages.count > 1:
            self._end_times.update(dict.fromkeys(slots, end))
        if self._inline:
            self.clock.wait_until(end)
        return end

    def _sampled_columns(
        self, shape: Shape, scheduled: ScheduledTokens, known_tokens: int
    ) -> tuple[int, int]:
        """Return the first column and the end of those in which a row samples, after its `known_tokens`
        tokens."""
        if shape.phase == "prefill":
            return 0, int(scheduled.start + scheduled.count >= known_tokens)
        if shape.phase == "verify":
            if scheduled.start + 1 < known_tokens:
                return 0, 0
            wrong = (i for i in range(1, scheduled.count) if self._random.random() >= self._acceptance)
            return 0, next(wrong, scheduled.count)
        return min(max(known_tokens - 1 - scheduled.start, 0), scheduled.count), scheduled.count


def _slot_of_row(scheduled: ScheduledTokens) -> int:
    """Return the slot of a scheduled row."""
    assert scheduled.request.slot is not None
    return scheduled.request.slot

"""Choice of programs to compile while an engine serves: those that save more time than compiling takes."""

from collections import Counter
from collections.abc import Sequence

from ...runtime.compiled.shapes import Shape, Sizes
from ...runtime.equal_bits.classes import ShapeClasses
from ...runtime.equal_bits.warmup import Warmup
from ..metrics.stats import EngineStats
from .batch import split_into_calls
from .scheduler import Scheduler
from .scheduler_output import SchedulerOutput

COMPARE_EVERY_STEPS = 4  # one step of this number is compared
MIN_COMPARED_STEPS = 8  # steps to compare before a program is chosen
IDLE_SECONDS = 1.0  # seconds without a step after which an engine counts as idle; its process may end before


class CompilePlanner:
    """Estimates what each missing shape would have saved of the steps since `reset`, as a share of their
    time.

    A call costs its tokens plus those of the smallest shape of its phase, which stand for reading the weights
    and for the host's work. So k times the tokens take (1 + k) / 2 times as long. The time of each phase is
    measured.

    expected_requests: requests that the caller has yet to submit; None if their number is unknown.
    """

    def __init__(self, sizes: Sizes, stats: EngineStats, classes: ShapeClasses):
        self.expected_requests: int | None = None
        self._sizes, self._stats, self._steps = sizes, stats, 0
        self._last_step_time = stats.now()
        self._smallest = {s.phase: s.area for s in sorted(classes.shapes, key=lambda s: -s.area)}
        self.reset()

    def reset(self) -> None:
        """Start the comparison anew, for an engine whose shapes have changed."""
        self._compared_steps, self._spent_tokens, self._saved_tokens = 0, Counter[str](), Counter[Shape]()

    def on_step(
        self,
        warmup: Warmup,
        classes: ShapeClasses,
        scheduler_output: SchedulerOutput,
        scheduler: Scheduler,
    ) -> None:
        """Record a step, and set the shape that the warm-up compiles next (`Warmup.wanted`)."""
        warmup.is_idle, self._last_step_time = False, self._stats.now()
        missing = warmup.missing
        if missing and not warmup.has_pending:
            self.record_savings(classes, missing, scheduler_output)
            seconds_left = estimate_work_seconds(scheduler, self._stats, self.expected_requests)
            warmup.wanted = self.next_shape(missing, seconds_left, warmup.programs.compile_times.mean)

    @property
    def is_engine_idle(self) -> bool:
        """True if there was no step for IDLE_SECONDS, and more requests may come."""
        return self.expected_requests is None and self._stats.now() - self._last_step_time > IDLE_SECONDS

    def record_savings(
        self, classes: ShapeClasses, missing: Sequence[Shape], scheduler_output: SchedulerOutput
    ) -> None:
        """Add the cost of a step with `classes`, and what each missing shape would save; one step in
        COMPARE_EVERY_STEPS."""
        # Empty steps alternate with others if each request has one token.
        self._steps += bool(scheduler_output)
        if self._steps % COMPARE_EVERY_STEPS or not scheduler_output:
            return
        self._compared_steps += 1
        cost = self._simulate_step_cost(classes, scheduler_output)
        self._spent_tokens.update(cost)
        for shape in missing:
            joined_cost = self._simulate_step_cost(classes.with_shape(shape), scheduler_output)
            self._saved_tokens[shape] += cost[shape.phase] - joined_cost[shape.phase]

    def _simulate_step_cost(self, classes: ShapeClasses, scheduler_output: SchedulerOutput) -> Counter[str]:
        """Return the cost of a step's calls by phase, in tokens; each call has a fixed cost too."""
        tokens = Counter[str]()
        for shape, _ in split_into_calls(classes, scheduler_output, self._sizes):
            tokens[shape.phase] += self._smallest[shape.phase] + shape.area
        return tokens

    def saved_share(self, shape: Shape) -> float:
        """Return the share of the steps' time that a shape would have saved."""
        spent, seconds = self._spent_tokens[shape.phase], self._stats.phase_seconds
        total = sum(seconds.values())
        return self._saved_tokens[shape] / spent * seconds[shape.phase] / total if spent and total else 0.0

    def next_shape(
        self, missing: Sequence[Shape], seconds_left: float, compile_seconds: float
    ) -> Shape | None:
        """Return the shape to compile now, in `compile_seconds` seconds, with `seconds_left` seconds of work
        to come; None if none pays.

        The shape saves the largest share s of the steps' time. Compiling slows the steps by about
        `compile_seconds` seconds, and the gain begins at its end. So it pays if
        s * (seconds_left - compile_seconds) >= compile_seconds.
        """
        best = max(missing, key=self.saved_share, default=None)
        if best is None or self._compared_steps < MIN_COMPARED_STEPS or self.saved_share(best) < 0:
            return None
        is_worthwhile = self.saved_share(best) * (seconds_left - compile_seconds) >= compile_seconds
        return best if is_worthwhile else None


def estimate_work_seconds(scheduler: Scheduler, stats: EngineStats, expected_requests: int | None) -> float:
    """Estimate the seconds of work to come, from the seconds that requests have taken so far.

    The estimate covers queued and running requests, and `expected_requests` requests after them. If
    `expected_requests` is None, it is at least the time so far. Before enough requests have ended, it is at
    most that time.
    """
    running, ended = scheduler.running.values(), stats.e2e.count
    progress = sum(r.num_computed_tokens / r.end for r in running)
    ahead = len(scheduler.waiting) + len(running) - progress + (expected_requests or 0)
    seconds = stats.seconds * ahead / max(ended + progress, 1)
    if ended < len(running):
        seconds = min(seconds, stats.seconds)
    return seconds if expected_requests is not None else max(seconds, stats.seconds)

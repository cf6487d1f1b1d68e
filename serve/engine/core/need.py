"""Choice of missing programs to compile beside serving: those that save traffic more time than they cost."""

from collections import Counter
from collections.abc import Sequence

from ...runtime.compiled.shapes import Shape, Sizes
from ...runtime.equal_bits.classes import ShapeClasses
from ...runtime.equal_bits.warmup import Warmup
from ..metrics.meter import EngineStats
from .plan import SchedulerOutput
from .rows import calls_of_plan
from .scheduler import Scheduler

EVERY = 4  # steps, of which one is compared
LOOKS = 8  # compared steps before which nothing is known of the traffic
GRACE = 1.0  # seconds without work before an engine counts as idle: its process may be about to end
LEAST = 0.02  # share of the time to come that any program is assumed to save: traffic changes


class Need:
    """Estimates what each missing shape would have saved of the steps since `forget`, as a share of their
    time.

    A call costs its tokens, and once more those of the smallest shape of its phase: with k times the tokens
    it takes (1 + k) / 2 times as long, since the weights are read once and the host works once. The division
    of time between phases is measured.

    to_come: requests that are still to be submitted; None if no end is in sight.
    """

    def __init__(self, sizes: Sizes, meter: EngineStats, first: ShapeClasses):
        self.to_come: int | None = None
        self._sizes, self._meter, self._steps = sizes, meter, 0
        self._since = meter.now()
        self._smallest = {s.phase: s.area for s in sorted(first.shapes, key=lambda s: -s.area)}
        self.forget()

    def forget(self) -> None:
        """Other shapes serve from now on."""
        self._looks, self._spent, self._spared = 0, Counter[str](), Counter[Shape]()

    def observe(
        self, warmup: Warmup | None, classes: ShapeClasses, plan: SchedulerOutput, scheduler: Scheduler
    ) -> None:
        """Record a step, and choose for its warm-up the next shape that is worth compiling beside serving."""
        if warmup is None:
            return
        warmup.idle, self._since = False, self._meter.now()
        missing = warmup.missing
        if missing and not warmup.has_in_hand:
            self.record(classes, missing, plan)
            left = seconds_left(scheduler, self._meter, self.to_come)
            warmup.wanted = self.choice(missing, left, warmup.programs.spent.mean)

    @property
    def is_over(self) -> bool:
        """True if there was no step for GRACE seconds, and more requests may come."""
        return self.to_come is None and self._meter.now() - self._since > GRACE

    def record(self, classes: ShapeClasses, missing: Sequence[Shape], plan: SchedulerOutput) -> None:
        """Compare some steps, as `classes` compute them, with each missing shape beside these."""
        self._steps += bool(plan)  # else requests of a token each might be missed for ever
        if self._steps % EVERY or not plan:
            return
        self._looks += 1
        now = self._cost(classes, plan)
        self._spent.update(now)
        for shape in missing:
            then = self._cost(classes.joined(shape), plan)
            self._spared[shape] += now[shape.phase] - then[shape.phase]

    def _cost(self, classes: ShapeClasses, plan: SchedulerOutput) -> Counter[str]:
        """Return the tokens of a step's calls by phase, with the fixed cost of each call."""
        found = Counter[str]()
        for shape, _ in calls_of_plan(classes, plan, self._sizes):
            found[shape.phase] += self._smallest[shape.phase] + shape.area
        return found

    def share(self, shape: Shape) -> float:
        """Return the share of the steps' time that a shape would have saved."""
        spent, seconds = self._spent[shape.phase], self._meter.phase_seconds
        whole = sum(seconds.values())
        return self._spared[shape] / spent * seconds[shape.phase] / whole if spent and whole else 0.0

    def choice(self, missing: Sequence[Shape], left: float, cost: float) -> Shape | None:
        """Return the shape to compile now, in `cost` seconds, with `left` seconds of work to come; None if
        none pays.

        It is the shape that saves the largest share s of the steps' time. Compiling takes about as much from
        the steps as it lasts, and the gain begins at its end: it pays if s * (left - cost) > cost. A job that
        ends before compiles nothing.
        """
        best = max(missing, key=self.share, default=None)
        if best is None or self._looks < LOOKS or self.share(best) < 0:
            return None
        return best if max(self.share(best), LEAST) * (left - cost) > cost else None


def seconds_left(scheduler: Scheduler, meter: EngineStats, to_come: int | None) -> float:
    """Estimate the seconds of work to come, from the seconds that requests have taken so far.

    It covers queued and running requests, and `to_come` behind them. It is at least the time so far if no end
    is in sight (None), and at most that before the first requests have ended.
    """
    running, ended = scheduler.running.values(), meter.e2e.count
    progress = sum(r.computed / r.end for r in running)
    ahead = len(scheduler.waiting) + len(running) - progress + (to_come or 0)
    left = meter.seconds * ahead / max(ended + progress, 1)
    if ended < len(running):
        left = min(left, meter.seconds)
    return left if to_come is not None else max(left, meter.seconds)

"""The search for the engine that bears most of a workload within limits: estimates rank layouts and knobs,
and the best are simulated under more and more load."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from ...options.checks import GIB
from ..workloads.tally import SLO
from ..workloads.traces import TraceEntry, faster
from ..workloads.workload import Workload
from .candidates import HANDED, Candidate, Space
from .estimate import SteadyState, estimate
from .fleet import Fleet
from .offload import swap
from .run import Simulation

RATIO = 1.2  # between the loads that are tried
FINE = 1.1  # between the last that was borne and the first that was not, about
SIMULATED = 3  # candidates among which the time is divided
LAYOUTS, VARIED = 4, 2  # candidates that are simulated, and whose knobs are changed before
TRIES = 6  # loads of a candidate
FEWEST, MOST = 128, 600  # requests of a simulation
LIFETIMES = 2  # of a request that a simulation lasts, about
FLEET = 8  # most replicas that are simulated; they stand for more


@dataclass(frozen=True)
class SearchGoal:
    """Goal of a search.

    within: limits of each request.
    share: of the requests that must keep them.
    seconds: of search.
    """

    within: SLO
    share: float = 0.99
    seconds: float = 30.0


@dataclass(frozen=True)
class Point:
    """A simulation of one replica: requests a second that came, and what came of them."""

    rate: float
    outcome: dict[str, Any]

    @property
    def line_grows(self) -> bool:
        """The queue grows: requests wait longer than they are served."""
        o = self.outcome
        return o["queued"].get("p90", 0.0) > o["e2e"].get("p50", 0.0) / 2

    def keeps(self, share: float) -> bool:
        """Tell if `share` of the requests were in time, and the queue did not grow."""
        return not self.outcome["given_up"] and self.outcome["in_time"] >= share and not self.line_grows


@dataclass
class CandidateResult:
    """A candidate, what was estimated, and the simulations of it."""

    candidate: Candidate
    steady: SteadyState
    points: list[Point] = field(default_factory=list)
    gains: list[tuple[str, float]] = field(default_factory=list)  # knobs by what they were estimated to give

    def borne(self, share: float) -> Point | None:
        """Return the simulation with the highest rate that was borne."""
        return max((p for p in self.points if p.keeps(share)), key=lambda p: p.rate, default=None)

    @property
    def nearest(self) -> Point:
        """The simulation with the most requests in time, of a candidate that bore no load."""
        return max(self.points, key=lambda p: (p.outcome["in_time"], -p.rate))

    def rate(self, share: float) -> float:
        """Requests a second and device that are borne."""
        point = self.borne(share)
        return point.rate / self.candidate.devices if point else 0.0


def search(
    space: Space, load: Workload, aim: SearchGoal, clock: Callable[[], float] = time.monotonic
) -> list[CandidateResult]:
    """The best candidates, the best first. What time does not allow is left out; one is always simulated.

    Raises ValueError where no layout fits.
    """
    until = clock() + aim.seconds
    found = [ranked(c, load, aim) for c in space.layouts()]
    if not found:
        why = "; ".join(f"{name}: {reason}" for name, reason in space.refused.items())
        raise ValueError(f"{space.job.name} does not fit {space.job.target.name} in any layout: {why}")
    found.sort(key=per_device, reverse=True)
    chosen = list(found[:LAYOUTS])
    chosen += [improved(space, answer, load, aim, lambda: clock() < until) for answer in found[:VARIED]]
    chosen = [a for i, a in enumerate(chosen) if all(a.candidate is not b.candidate for b in chosen[:i])]
    chosen += splits(max(chosen, key=per_device), load, aim)
    chosen.sort(key=per_device, reverse=True)
    each = aim.seconds / max(1, min(SIMULATED, len(chosen)))
    for i, answer in enumerate(chosen):
        if i == 0 or clock() < until:
            bear(answer, load, aim, below(answer, load), min(until, clock() + each), clock)
    return sorted(chosen, key=lambda a: (a.rate(aim.share), per_device(a)), reverse=True)


def below(answer: CandidateResult, load: Workload) -> float:
    """Requests a second to begin with: somewhat fewer than are estimated; where that is none, one after the
    other."""
    return answer.steady.rate / RATIO or 1 / (load.output * answer.steady.tpot)


def splits(answer: CandidateResult, load: Workload, aim: SearchGoal) -> list[CandidateResult]:
    """The candidate with prompts computed apart, in the ratio that is estimated to be the best."""
    found = (ranked(other, load, aim) for other in answer.candidate.splits())
    return sorted(found, key=per_device, reverse=True)[:1]


def ranked(candidate: Candidate, load: Workload, aim: SearchGoal) -> CandidateResult:
    return CandidateResult(candidate, estimate(candidate, load, aim.within, aim.share))


def per_device(answer: CandidateResult) -> float:
    return answer.steady.rate / answer.candidate.devices


def improved(
    space: Space, answer: CandidateResult, load: Workload, aim: SearchGoal, goes_on: Callable[[], bool]
) -> CandidateResult:
    """The candidate with each knob in turn at its best by the estimates; of values as good as each other the
    one that is there stays."""
    gains: dict[str, float] = {}
    changes = stated(answer.candidate, space)
    for name, change in list(space.variations(answer.candidate)):
        other = space.candidate(**(changes | change)) if goes_on() else None
        if other is None:
            continue
        tried = ranked(other, load, aim)
        if per_device(tried) > 1.01 * per_device(answer):
            gain = per_device(tried) / per_device(answer) if per_device(answer) else math.inf
            gains[name] = gains.get(name, 1.0) * gain
            changes, answer = changes | change, tried
    return replace(answer, gains=list(gains.items()))


def stated(candidate: Candidate, space: Space) -> dict[str, Any]:
    """The options of a candidate that are not the base's."""
    own, base = vars(candidate.options), vars(space.base)
    return {name: own[name] for name in base if name in own and own[name] != base[name]}


def bear(
    answer: CandidateResult,
    load: Workload,
    aim: SearchGoal,
    start: float,
    until: float,
    clock: Callable[[], float],
) -> None:
    """Simulate a candidate under loads around a first one, until it is known within FINE how much it bears,
    or time is over."""
    low, high, rate = 0.0, math.inf, start
    while not answer.points or (clock() < until and len(answer.points) < TRIES):
        point = Point(rate, simulated(answer.candidate, load, rate, answer.steady.rows, aim))
        answer.points.append(point)
        low, high = (rate, high) if point.keeps(aim.share) else (low, rate)
        if low and high < math.inf:
            if high / low <= FINE**2:
                return
            rate = math.sqrt(low * high)
        else:
            rate = rate * RATIO if low else rate / RATIO ** (2 * len(answer.points))


def without(
    answer: CandidateResult,
    load: Workload,
    aim: SearchGoal,
    until: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, float]:
    """Requests a second that one replica would bear without each limit; those that time sufficed to find."""
    found: dict[str, float] = {}
    for name, limit in aim.within._asdict().items():
        if limit < math.inf and clock() < until:
            free = replace(aim, within=aim.within._replace(**{name: math.inf}))
            own, borne = CandidateResult(answer.candidate, answer.steady), answer.borne(aim.share)
            start = RATIO * borne.rate if borne else below(answer, load)
            bear(own, load, free, start, until, clock)
            if both := [p for p in (own.borne(aim.share), borne) if p]:
                found[name] = max(p.rate for p in both)
    return found


def served(answer: CandidateResult, load: Workload, aim: SearchGoal) -> tuple[int, Point] | None:
    """Return how many replicas bear the workload's own rate, and a simulation of them; None if a replica
    bears nothing, or all requests arrive at once."""
    borne = answer.borne(aim.share)
    if borne is None or math.isinf(load.rate):
        return None
    count = math.ceil(load.rate / borne.rate)
    some, free = min(count, FLEET), replace(aim, share=0.0)
    rate = load.rate * some / count
    return count, Point(rate, simulated(answer.candidate, load, rate, answer.steady.rows, free, some))


def simulated(
    own: Candidate, load: Workload, rate: float, rows: float, aim: SearchGoal, replicas: int = 1
) -> dict[str, Any]:
    """Simulate `replicas` of a candidate under `rate` requests a second, while about `rows` requests run in
    each engine."""
    lasting = MOST if own.apart else LIFETIMES * rows  # a line of prompts grows slowly
    count = int(min(max(FEWEST, lasting), MOST)) * own.decoders * replicas
    entries = dealt(load, count, rate)
    return fleet_of(own, replicas).serve(entries, aim.within, most_late=(1 - aim.share) * count)


def fleet_of(own: Candidate, replicas: int = 1) -> Fleet:
    """Replicas of a candidate behind the router's placement; of each its engines."""
    engines = [simulation_of(own) for _ in range(own.decoders * replicas)]
    prefills = [simulation_of(own) for _ in range(replicas)] if own.apart else []
    return Fleet(engines, prefills, own.token_seconds)


def simulation_of(own: Candidate) -> Simulation:
    """An engine of it, with pages in the host's memory where the options ask for that."""
    demands = own.times.demands
    found = Simulation(
        demands.config,
        demands.params,
        own.options,
        own.fitted.sizes,
        own.times,
        own.platform,
        acceptance=own.acceptance,
        host=own.times.efficiency.host,
    )
    if own.options.enable_prefix_caching and own.options.swap_space:
        swap(found, int(own.options.swap_space * GIB), own.page_bytes, HANDED * own.fitted.layout.size)
    return found


def dealt(load: Workload, count: int, rate: float) -> Iterator[TraceEntry]:
    """Requests at a rate, of a workload that is repeated where it is too short."""
    entries = load.repeated(count).entries
    if math.isinf(load.rate):
        return (replace(e, arrival=i / rate) for i, e in enumerate(islice(entries, count)))
    return faster(islice(entries, count), rate / load.rate)

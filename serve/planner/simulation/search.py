"""The search for the engine that sustains the most of a workload within limits. Estimates rank layouts and
knobs, and the best are simulated under more and more load."""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from ...options.checks import GIB
from ..workloads.slo_stats import SLO
from ..workloads.traces import TraceEntry, speed_up
from ..workloads.workload import Workload
from .candidates import KV_TRANSFER_BANDWIDTH, Candidate, SearchSpace
from .engine_simulation import Simulation
from .estimate import SteadyState, estimate_steady_state
from .fleet import Fleet
from .offload import attach_host_pages

LOAD_RATIO = 1.2  # factor between rates that are tried
FINE_RATIO = 1.1  # factor between the highest sustained rate and the next, about
MAX_SIMULATED = 3  # candidates that share the time
MAX_LAYOUTS, MAX_VARIED = 4, 2  # candidates to simulate, and to improve before
MAX_LOADS = 6  # rates of a candidate, at most
MIN_REQUESTS, MAX_REQUESTS = 128, 600  # requests of a simulation, at least and at most
REQUEST_LIFETIMES = 2  # duration of a simulation in lifetimes of a request, about
MAX_REPLICAS = 8  # replicas that are simulated, at most; more behave alike


@dataclass(frozen=True)
class SearchGoal:
    """Goal of a search.

    slo: limits of each request.
    share: share of the requests that must keep them.
    seconds: duration of the search.
    """

    slo: SLO
    share: float = 0.99
    seconds: float = 30.0


@dataclass(frozen=True)
class LoadPoint:
    """A simulation of one replica.

    rate: requests a second that arrived.
    outcome: figures of the simulation, as plain numbers.
    """

    rate: float
    outcome: dict[str, Any]

    @property
    def is_queue_growing(self) -> bool:
        """Tell if the queue grows, that is, if requests wait longer than they are served."""
        o = self.outcome
        return o["queued"].get("p90", 0.0) > o["e2e"].get("p50", 0.0) / 2

    def is_sustained(self, share: float) -> bool:
        """Tell if `share` of the requests were in time, and the queue did not grow."""
        return not self.outcome["given_up"] and self.outcome["in_time"] >= share and not self.is_queue_growing


@dataclass
class CandidateResult:
    """A candidate with its estimate and its simulations.

    steady: estimated steady state.
    points: simulations so far.
    gains: knobs that were changed, each with the factor of the estimated rate.
    """

    candidate: Candidate
    steady: SteadyState
    points: list[LoadPoint] = field(default_factory=list)
    gains: list[tuple[str, float]] = field(default_factory=list)

    def best_point(self, share: float) -> LoadPoint | None:
        """Return the simulation with the highest rate that was sustained, or None."""
        return max((p for p in self.points if p.is_sustained(share)), key=lambda p: p.rate, default=None)

    @property
    def nearest_point(self) -> LoadPoint:
        """Return the simulation with the most requests in time, of a candidate that sustained no load."""
        return max(self.points, key=lambda p: (p.outcome["in_time"], -p.rate))

    def device_rate(self, share: float) -> float:
        """Return the requests a second and device that are sustained."""
        point = self.best_point(share)
        return point.rate / self.candidate.num_devices if point else 0.0


def search_candidates(
    space: SearchSpace, workload: Workload, goal: SearchGoal, clock: Callable[[], float] = time.monotonic
) -> list[CandidateResult]:
    """Search the best candidates and return them, the best first. Simulations beyond the time are skipped,
    but one always runs.

    Raises ValueError if no layout fits.
    """
    deadline = clock() + goal.seconds
    results = [estimate_candidate(c, workload, goal) for c in space.layout_candidates()]
    if not results:
        why = "; ".join(f"{name}: {reason}" for name, reason in space.refused_layouts.items())
        raise ValueError(f"{space.model.name} does not fit {space.model.target.name} in any layout: {why}")
    results.sort(key=estimated_device_rate, reverse=True)
    chosen = list(results[:MAX_LAYOUTS])
    chosen += [
        improve_knobs(space, result, workload, goal, lambda: clock() < deadline)
        for result in results[:MAX_VARIED]
    ]
    chosen = [a for i, a in enumerate(chosen) if all(a.candidate is not b.candidate for b in chosen[:i])]
    chosen += estimate_best_split(max(chosen, key=estimated_device_rate), workload, goal)
    chosen.sort(key=estimated_device_rate, reverse=True)
    simulate_candidates(chosen, workload, goal, deadline, clock)
    return sorted(chosen, key=lambda a: (a.device_rate(goal.share), estimated_device_rate(a)), reverse=True)


def simulate_candidates(
    chosen: list[CandidateResult],
    workload: Workload,
    goal: SearchGoal,
    deadline: float,
    clock: Callable[[], float],
) -> None:
    """Simulate candidates: each at one load, so that a wrong estimate costs little time, then those with the
    highest sustained loads first. Simulations beyond the time are skipped, but one always runs."""

    def simulate(result: CandidateResult, end: float) -> None:
        simulate_until_capacity(result, workload, goal, starting_rate(result, workload), end, clock)

    for i, result in enumerate(chosen):
        if i == 0 or clock() < deadline:
            simulate(result, -math.inf)
    candidate_seconds = goal.seconds / max(1, min(MAX_SIMULATED, len(chosen)))
    for result in sorted(chosen, key=lambda a: a.device_rate(goal.share), reverse=True):
        if clock() < deadline:
            simulate(result, min(deadline, clock() + candidate_seconds))


def starting_rate(result: CandidateResult, workload: Workload) -> float:
    """Return the first rate to simulate, somewhat below the estimate. If the estimate is 0, requests come one
    after the other."""
    return result.steady.rate / LOAD_RATIO or 1 / (workload.output * result.steady.tpot)


def estimate_best_split(
    result: CandidateResult, workload: Workload, goal: SearchGoal
) -> list[CandidateResult]:
    """Return the candidate with prompts computed by other engines, in the ratio with the best estimate."""
    results = (
        estimate_candidate(split, workload, goal) for split in result.candidate.disaggregated_candidates()
    )
    return sorted(results, key=estimated_device_rate, reverse=True)[:1]


def estimate_candidate(candidate: Candidate, workload: Workload, goal: SearchGoal) -> CandidateResult:
    """Estimate a candidate."""
    return CandidateResult(candidate, estimate_steady_state(candidate, workload, goal.slo, goal.share))


def estimated_device_rate(result: CandidateResult) -> float:
    """Return the estimated requests a second and device."""
    return result.steady.rate / result.candidate.num_devices


def improve_knobs(
    space: SearchSpace,
    result: CandidateResult,
    workload: Workload,
    goal: SearchGoal,
    has_time: Callable[[], bool],
) -> CandidateResult:
    """Change one knob of a candidate after the other to its best value by the estimates. A knob stays if no
    value is 1 % better."""
    gains: dict[str, float] = {}
    changes = changed_options(result.candidate, space)
    for name, change in list(space.variations(result.candidate)):
        other = space.try_candidate(**(changes | change)) if has_time() else None
        if other is None:
            continue
        tried = estimate_candidate(other, workload, goal)
        if estimated_device_rate(tried) > 1.01 * estimated_device_rate(result):
            gain = (
                estimated_device_rate(tried) / estimated_device_rate(result)
                if estimated_device_rate(result)
                else math.inf
            )
            gains[name] = gains.get(name, 1.0) * gain
            changes, result = changes | change, tried
    return replace(result, gains=list(gains.items()))


def changed_options(candidate: Candidate, space: SearchSpace) -> dict[str, Any]:
    """Return the options of a candidate that differ from the base options."""
    options, base = vars(candidate.options), vars(space.base_options)
    return {name: options[name] for name in base if name in options and options[name] != base[name]}


def simulate_until_capacity(
    result: CandidateResult,
    workload: Workload,
    goal: SearchGoal,
    first_rate: float,
    deadline: float,
    clock: Callable[[], float],
) -> None:
    """Simulate a candidate at more rates, the first of all `first_rate`. Stop when its highest sustained
    rate is known within FINE_RATIO, or time is over; one simulation always runs."""
    while not result.points or (clock() < deadline and len(result.points) < MAX_LOADS):
        rate = next_rate(result.points, goal.share) if result.points else first_rate
        if rate is None:
            return
        outcome = simulate_candidate(result.candidate, workload, rate, result.steady.rows, goal)
        result.points.append(LoadPoint(rate, outcome))


def next_rate(points: list[LoadPoint], share: float) -> float | None:
    """Return the rate to simulate after these simulations; None if the highest sustained rate is known within
    FINE_RATIO."""
    low = max((p.rate for p in points if p.is_sustained(share)), default=0.0)
    high = min((p.rate for p in points if not p.is_sustained(share)), default=math.inf)
    if low and high < math.inf:
        return None if high / low <= FINE_RATIO**2 else math.sqrt(low * high)
    return points[-1].rate * LOAD_RATIO if low else points[-1].rate / LOAD_RATIO ** (2 * len(points))


def simulate_without_each_limit(
    result: CandidateResult,
    workload: Workload,
    goal: SearchGoal,
    deadline: float,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, float]:
    """Return the requests a second that one replica sustains if one limit is dropped, for each limit. Limits
    beyond the time are skipped."""
    rates: dict[str, float] = {}
    for name, limit in goal.slo._asdict().items():
        if limit < math.inf and clock() < deadline:
            relaxed_goal = replace(goal, slo=goal.slo._replace(**{name: math.inf}))
            relaxed_result, best = (
                CandidateResult(result.candidate, result.steady),
                result.best_point(goal.share),
            )
            start = LOAD_RATIO * best.rate if best else starting_rate(result, workload)
            simulate_until_capacity(relaxed_result, workload, relaxed_goal, start, deadline, clock)
            if points := [p for p in (relaxed_result.best_point(goal.share), best) if p]:
                rates[name] = max(p.rate for p in points)
    return rates


def size_fleet(result: CandidateResult, workload: Workload, goal: SearchGoal) -> tuple[int, LoadPoint] | None:
    """Return how many replicas sustain the workload's own rate, and a simulation of them. Return None if a
    replica sustains nothing, or all requests arrive at once."""
    best = result.best_point(goal.share)
    if best is None or math.isinf(workload.rate):
        return None
    count = math.ceil(workload.rate / best.rate)
    simulated_count, relaxed_goal = min(count, MAX_REPLICAS), replace(goal, share=0.0)
    rate = workload.rate * simulated_count / count
    return count, LoadPoint(
        rate,
        simulate_candidate(
            result.candidate, workload, rate, result.steady.rows, relaxed_goal, simulated_count
        ),
    )


def simulate_candidate(
    candidate: Candidate, workload: Workload, rate: float, rows: float, goal: SearchGoal, replicas: int = 1
) -> dict[str, Any]:
    """Simulate `replicas` replicas at `rate` requests a second, while about `rows` requests run in
    each engine. Return the outcome as plain numbers."""
    # A queue of prompts grows slowly.
    wanted = MAX_REQUESTS if candidate.decoders_per_prefill else REQUEST_LIFETIMES * rows
    count = int(min(max(MIN_REQUESTS, wanted), MAX_REQUESTS)) * candidate.num_decoders * replicas
    entries = entries_at_rate(workload, count, rate)
    return build_fleet(candidate, replicas).serve(entries, goal.slo, max_late=(1 - goal.share) * count)


def build_fleet(candidate: Candidate, replicas: int = 1) -> Fleet:
    """Build the engines of `replicas` replicas, behind the router's placement."""
    engines = [build_simulation(candidate) for _ in range(candidate.num_decoders * replicas)]
    prefills = (
        [build_simulation(candidate) for _ in range(replicas)] if candidate.decoders_per_prefill else []
    )
    return Fleet(engines, prefills, candidate.token_transfer_seconds)


def build_simulation(candidate: Candidate) -> Simulation:
    """Build an engine of a candidate, with pages in the host's memory if its options have `swap_space`."""
    demands = candidate.roofline.demands
    simulation = Simulation(
        demands.config,
        demands.params,
        candidate.options,
        candidate.fitted.sizes,
        candidate.roofline,
        candidate.platform,
        acceptance=candidate.acceptance,
        host=candidate.roofline.efficiency.host,
    )
    if candidate.options.enable_prefix_caching and candidate.options.swap_space:
        attach_host_pages(
            simulation,
            int(candidate.options.swap_space * GIB),
            candidate.page_bytes,
            KV_TRANSFER_BANDWIDTH * candidate.fitted.layout.num_devices,
        )
    return simulation


def entries_at_rate(workload: Workload, count: int, rate: float) -> Iterator[TraceEntry]:
    """Return `count` requests at a rate. The workload is repeated if it is too short."""
    entries = workload.repeat(count).entries
    if math.isinf(workload.rate):
        return (replace(e, arrival=i / rate) for i, e in enumerate(islice(entries, count)))
    return speed_up(islice(entries, count), rate / workload.rate)

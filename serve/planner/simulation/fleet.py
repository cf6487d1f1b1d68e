"""A workload that is served by engines behind the router's placement, in simulated time."""

import heapq
import math
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle
from typing import Any

from ...engine.core.request import Request
from ...engine.metrics.stats import padding_shares
from ...kv.routing.placement import Replica, RoutedPrompt, RoutedRequest, choose_replica
from ...kv.routing.prefix_index import AssumedPrefixIndex
from ..workloads.slo_stats import NO_LIMITS, SLO, SLOStats
from ..workloads.traces import BLOCK_TOKENS, TraceEntry
from .engine_simulation import Simulation
from .offload import SimulatedLink, attach_remote_pages

ReplicaChooser = Callable[..., Replica | None]  # like the router's `choose_replica`


def prompt_from_entry(entry: TraceEntry) -> RoutedPrompt:
    """Return a prompt as the router sees it: its pages are the trace's blocks."""
    full_blocks = entry.prompt_tokens // BLOCK_TOKENS
    return RoutedPrompt(
        [b"%d" % name for name in entry.blocks[:full_blocks]], BLOCK_TOKENS, entry.prompt_tokens
    )


@dataclass(eq=False)
class SimulatedPrefillEngine:
    """An engine that computes prompts for others, as requests of one token.

    waiting: requests, each with the callback for its end.
    """

    simulation: Simulation
    waiting: dict[Request, Callable[[float], None]] = field(default_factory=dict)

    def __post_init__(self):
        self.simulation.on_request_end = self._on_prompt_computed

    def submit_prompt(self, entry: TraceEntry, on_ready: Callable[[float], None]) -> None:
        """Submit a prompt; call `on_ready` with the moment of its end."""
        request = self.simulation.make_request(replace(entry, output_tokens=1))
        self.waiting[request] = on_ready
        self.simulation.submit_at(request, entry.arrival)

    def _on_prompt_computed(self, request: Request) -> None:
        self.waiting.pop(request)(request.times.finish)


@dataclass(eq=False)
class SimulatedReplica:
    """An engine of a fleet as the router sees it.

    stats: statistics of the fleet's requests.
    address: name of the replica.
    prefill_engine: engine that computes its prompts, if another does.
    link: over which their pages arrive.
    """

    simulation: Simulation
    stats: SLOStats
    address: str
    prefill_engine: SimulatedPrefillEngine | None = None
    link: SimulatedLink = field(default_factory=SimulatedLink)

    def __post_init__(self):
        max_blocks = (
            self.simulation.sizes.shards * max(self.simulation.sizes.pages) * self._page_size // BLOCK_TOKENS
        )
        self.replica = Replica(self.address, AssumedPrefixIndex(max_blocks))
        self.replica.is_up = self.replica.is_ready = True
        self.simulation.on_request_end = self._on_request_end
        self._routed_requests: dict[Request, RoutedRequest] = {}
        self._awaiting_first_token: deque[Request] = deque()  # no first token yet
        self._ended_requests: deque[tuple[float, RoutedRequest]] = deque()
        # Requests with computed prompts: (moment, order, request).
        self._kv_transfers: list[tuple[float, int, Request]] = []

    @property
    def _page_size(self) -> int:
        return self.simulation.sizes.page_size

    def submit_entry(self, entry: TraceEntry, prompt: RoutedPrompt) -> None:
        """Submit a request that the router has placed here."""
        request, routed_request = self.simulation.make_request(entry), RoutedRequest(prompt)
        self.replica.add_request(routed_request)
        self._routed_requests[request] = routed_request
        self._awaiting_first_token.append(request)
        if self.prefill_engine is None:
            self.simulation.submit_at(request, entry.arrival)
        else:
            self.prefill_engine.submit_prompt(entry, partial(self._on_prompt_computed, request))

    def _on_prompt_computed(self, request: Request, moment: float) -> None:
        arrival = self.link.send(moment, len(request.prompt) // self._page_size * self._page_size)
        heapq.heappush(self._kv_transfers, (arrival, request.arrival, request))

    def _on_request_end(self, request: Request) -> None:
        self.stats(request)
        self._ended_requests.append((request.times.finish, self._routed_requests.pop(request)))

    def advance(self, end: float) -> None:
        """Run the engine until a moment. Prompts that arrive from the prefill engine are submitted on the
        way."""
        while self._kv_transfers and self._kv_transfers[0][0] <= end:
            at, _, request = heapq.heappop(self._kv_transfers)
            self.simulation.advance(at, self._is_hopeless)
            self.simulation.submit_at(request, at)
        self.simulation.advance(end, self._is_hopeless)

    def _is_hopeless(self) -> bool:
        return self.stats.is_hopeless

    def report_to_router(self, now: float) -> None:
        """Report to the router the first tokens and the ends up to `now`."""
        while self._awaiting_first_token and 0 < self._awaiting_first_token[0].times.first_token <= now:
            request = self._awaiting_first_token.popleft()
            if request in self._routed_requests:
                self.replica.on_prefill_done(self._routed_requests[request])
        while self._ended_requests and self._ended_requests[0][0] <= now:
            self.replica.remove_request(self._ended_requests.popleft()[1])


class Fleet:
    """Engines behind a router, which places each request by `choose`.

    simulations: engines that decode.
    prefill_simulations: engines that compute the prompts of the others; each serves an equal number of them.
    token_transfer_seconds: seconds to send a token's keys between two engines.
    """

    def __init__(
        self,
        simulations: Sequence[Simulation],
        prefills: Sequence[Simulation] = (),
        token_transfer_seconds: float = 0.0,
        choose: ReplicaChooser = choose_replica,
    ):
        self.simulations, self.prefill_simulations, self._choose = simulations, prefills, choose
        self._token_transfer_seconds = token_transfer_seconds

    def serve(
        self, entries: Iterable[TraceEntry], slo: SLO = NO_LIMITS, max_late: float = math.inf
    ) -> dict[str, Any]:
        """Serve requests as they arrive, in order, until all have ended. Give up if more than `max_late`
        have missed the limits. Return the outcome as plain numbers."""
        stats = SLOStats(slo, max_late)
        given_up = self._play_entries(entries, self._make_replicas(stats), stats)
        return (
            stats.report()
            | fleet_outcome(self.simulations, self.prefill_simulations, stats)
            | {"given_up": given_up}
        )

    def _make_replicas(self, stats: SLOStats) -> list[SimulatedReplica]:
        """Return a replica for each engine, with its prefill engine if there are any."""
        if not self.prefill_simulations:
            return [
                SimulatedReplica(simulation, stats, str(i)) for i, simulation in enumerate(self.simulations)
            ]
        attach_remote_pages(self.simulations)
        sources = cycle([SimulatedPrefillEngine(simulation) for simulation in self.prefill_simulations])
        pairs = enumerate(zip(self.simulations, sources, strict=False))
        return [
            SimulatedReplica(simulation, stats, str(i), source, SimulatedLink(self._token_transfer_seconds))
            for i, (simulation, source) in pairs
        ]

    def _play_entries(
        self, entries: Iterable[TraceEntry], replicas: Sequence[SimulatedReplica], stats: SLOStats
    ) -> bool:
        """Serve the requests. Return True if the simulation was given up before its end."""
        longest = self.simulations[0].sizes.max_model_len
        for entry in entries:
            if entry.prompt_tokens + entry.output_tokens > longest:
                stats.too_long += 1
                continue
            self._advance(replicas, stats, entry.arrival)
            if stats.is_hopeless:
                return True
            self._route_entry(entry, replicas)
        self._advance(replicas, stats, math.inf)
        return not all(simulation.is_idle for simulation in self.simulations)

    def _advance(self, replicas: Sequence[SimulatedReplica], stats: SLOStats, end: float) -> None:
        for prefill in self.prefill_simulations:
            prefill.advance(end, lambda: stats.is_hopeless)
        for member in replicas:
            member.advance(end)
            member.report_to_router(end)

    def _route_entry(self, entry: TraceEntry, replicas: Sequence[SimulatedReplica]) -> None:
        prompt = prompt_from_entry(entry)
        chosen = self._choose([member.replica for member in replicas], prompt, sys.maxsize, ())
        next(member for member in replicas if member.replica is chosen).submit_entry(entry, prompt)


def fleet_outcome(
    simulations: Sequence[Simulation], prefills: Sequence[Simulation], stats: SLOStats
) -> dict[str, Any]:
    """Return the figures of all engines. Prompts are counted on the engine that computes them."""
    all_simulations, prompt_simulations = [*simulations, *prefills], prefills or simulations
    engine_stats = [simulation.engine.stats for simulation in all_simulations]
    stages = [simulation.executor.stages for simulation in all_simulations]
    prompts = sum(simulation.engine.stats.prompt_tokens for simulation in prompt_simulations)
    cached = sum(simulation.engine.stats.cached_tokens for simulation in prompt_simulations)
    generated = sum(simulation.engine.stats.generated_tokens for simulation in simulations)
    open_seconds = sum(engine_stages.in_flight_seconds for engine_stages in stages)
    return {
        "tokens_per_second": generated / stats.duration_seconds,
        "busy": open_seconds / stats.duration_seconds / len(all_simulations),
        "bubbles": 1
        - sum(engine_stages.busy_seconds / engine_stages.count for engine_stages in stages) / open_seconds
        if open_seconds
        else 0.0,
        **padding_shares(engine_stats),
        "peak_cache_occupancy": max(meter.peak_occupancy for meter in engine_stats),
        "prefix_hit_rate": cached / max(prompts, 1),
        "preemptions": sum(simulation.engine.scheduler.preemptions for simulation in all_simulations),
        "prompt_tokens": prompts,
        "generated_tokens": generated,
        "steps": dict(
            sorted(sum((Counter(meter.calls_by_shape) for meter in engine_stats), Counter[str]()).items())
        ),
        "cache_pages": sum(
            simulation.sizes.shards * sum(simulation.sizes.pages) for simulation in all_simulations
        ),
        "page_size": simulations[0].sizes.page_size,
    }

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
from ...engine.metrics.meter import paddings
from ...kv.routing.placement import Prompt, Replica, RoutedRequest, best
from ...kv.routing.prefix_index import AssumedPrefixIndex
from ..workloads.tally import ANY, SLO, SLOStats
from ..workloads.traces import BLOCK, TraceEntry
from .offload import SimulatedLink, handed_to
from .run import Simulation

Choice = Callable[..., Replica | None]  # as the router's


def placed(entry: TraceEntry) -> Prompt:
    """Return a prompt as the router sees it, whose pages are the trace's blocks."""
    full = entry.prompt // BLOCK
    return Prompt([b"%d" % name for name in entry.blocks[:full]], BLOCK, entry.prompt)


@dataclass(eq=False)
class SimulatedPrefillEngine:
    """An engine that computes prompts for others, as requests of one token."""

    simulation: Simulation
    asked: dict[Request, Callable[[float], None]] = field(default_factory=dict)  # and who waits for each

    def __post_init__(self):
        self.simulation.engine.on_end = self._computed

    def ask(self, entry: TraceEntry, ready: Callable[[float], None]) -> None:
        request = self.simulation.request_of(replace(entry, output=1))
        self.asked[request] = ready
        self.simulation.arrive(request, entry.arrival)

    def _computed(self, request: Request) -> None:
        self.asked.pop(request)(request.clock.finish)


@dataclass(eq=False)
class SimulatedReplica:
    """An engine of a fleet as the router sees it. With a `source` its prompts are computed there, and their
    pages come over the `link`."""

    simulation: Simulation
    tally: SLOStats
    address: str
    source: SimulatedPrefillEngine | None = None
    link: SimulatedLink = field(default_factory=SimulatedLink)

    def __post_init__(self):
        most = self.simulation.sizes.shards * max(self.simulation.sizes.pages) * self._page_size // BLOCK
        self.replica = Replica(self.address, AssumedPrefixIndex(most))
        self.replica.is_up = self.replica.is_ready = True
        self.simulation.engine.on_end = self._ended
        self._jobs: dict[Request, RoutedRequest] = {}
        self._unread: deque[Request] = deque()  # whose first token has not been seen
        self._gone: deque[tuple[float, RoutedRequest]] = deque()
        self._coming: list[tuple[float, int, Request]] = []  # whose prompts are computed

    @property
    def _page_size(self) -> int:
        return self.simulation.sizes.page_size

    def take(self, entry: TraceEntry, prompt: Prompt) -> None:
        """A request is placed here."""
        request, job = self.simulation.request_of(entry), RoutedRequest(prompt)
        self.replica.take(job)
        self._jobs[request] = job
        self._unread.append(request)
        if self.source is None:
            self.simulation.arrive(request, entry.arrival)
        else:
            self.source.ask(entry, partial(self._computed, request))

    def _computed(self, request: Request, moment: float) -> None:
        at = self.link.carried(moment, len(request.prompt) // self._page_size * self._page_size)
        heapq.heappush(self._coming, (at, request.arrival, request))

    def _ended(self, request: Request) -> None:
        self.tally(request)
        self._gone.append((request.clock.finish, self._jobs.pop(request)))

    def advance(self, until: float) -> None:
        while self._coming and self._coming[0][0] <= until:
            at, _, request = heapq.heappop(self._coming)
            self.simulation.advance(at, self._is_enough)
            self.simulation.arrive(request, at)
        self.simulation.advance(until, self._is_enough)

    def _is_enough(self) -> bool:
        return self.tally.is_hopeless

    def tell(self, now: float) -> None:
        """Report to the router what has happened by now: first tokens, and ends."""
        while self._unread and 0 < self._unread[0].clock.first_token <= now:
            request = self._unread.popleft()
            if request in self._jobs:
                self.replica.begun(self._jobs[request])
        while self._gone and self._gone[0][0] <= now:
            self.replica.leave(self._gone.popleft()[1])


class Fleet:
    """Engines behind a router, which places each request by `choose`.

    prefills: engines that compute the prompts of the others, each of an equal number of them.
    token_seconds: of a token's keys on the link between two engines.
    """

    def __init__(
        self,
        simulations: Sequence[Simulation],
        prefills: Sequence[Simulation] = (),
        token_seconds: float = 0.0,
        choose: Choice = best,
    ):
        self.simulations, self.prefills, self._choose = simulations, prefills, choose
        self._token_seconds = token_seconds

    def serve(
        self, entries: Iterable[TraceEntry], within: SLO = ANY, most_late: float = math.inf
    ) -> dict[str, Any]:
        """Serve requests as they arrive, in order, until all have ended, or more than `most_late` have missed
        the limits. Returns the outcome as plain numbers."""
        tally = SLOStats(within, most_late)
        given_up = self._play(entries, self._members(tally), tally)
        return tally.report() | outcome(self.simulations, self.prefills, tally) | {"given_up": given_up}

    def _members(self, tally: SLOStats) -> list[SimulatedReplica]:
        if not self.prefills:
            return [SimulatedReplica(own, tally, str(i)) for i, own in enumerate(self.simulations)]
        handed_to(self.simulations)
        sources = cycle([SimulatedPrefillEngine(own) for own in self.prefills])
        pairs = enumerate(zip(self.simulations, sources, strict=False))
        return [
            SimulatedReplica(own, tally, str(i), source, SimulatedLink(self._token_seconds))
            for i, (own, source) in pairs
        ]

    def _play(
        self, entries: Iterable[TraceEntry], members: Sequence[SimulatedReplica], tally: SLOStats
    ) -> bool:
        """Serve the requests; returns True if the simulation was given up before its end."""
        longest = self.simulations[0].sizes.max_model_len
        for entry in entries:
            if entry.prompt + entry.output > longest:
                tally.left_out += 1
                continue
            self._advance(members, tally, entry.arrival)
            if tally.is_hopeless:
                return True
            self._place(entry, members)
        self._advance(members, tally, math.inf)
        return not all(own.is_idle for own in self.simulations)

    def _advance(self, members: Sequence[SimulatedReplica], tally: SLOStats, until: float) -> None:
        for prefill in self.prefills:
            prefill.advance(until, lambda: tally.is_hopeless)
        for member in members:
            member.advance(until)
            member.tell(until)

    def _place(self, entry: TraceEntry, members: Sequence[SimulatedReplica]) -> None:
        prompt = placed(entry)
        chosen = self._choose([member.replica for member in members], prompt, sys.maxsize, ())
        next(member for member in members if member.replica is chosen).take(entry, prompt)


def outcome(parts: Sequence[Simulation], prefills: Sequence[Simulation], tally: SLOStats) -> dict[str, Any]:
    """Return the figures of all engines. Prompts are counted where they are computed."""
    every, readers = [*parts, *prefills], prefills or parts
    meters, stages = [own.engine.meter for own in every], [own.programs.stages for own in every]
    prompts = sum(own.engine.meter.prompt_tokens for own in readers)
    cached = sum(own.engine.meter.cached_tokens for own in readers)
    generated = sum(own.engine.meter.generated_tokens for own in parts)
    open_seconds = sum(own.open for own in stages)
    return {
        "tokens_per_second": generated / tally.seconds,
        "busy": open_seconds / tally.seconds / len(every),
        "bubbles": 1 - sum(own.busy / own.count for own in stages) / open_seconds if open_seconds else 0.0,
        **paddings(meters),
        "peak_cache_occupancy": max(meter.occupancy for meter in meters),
        "prefix_hit_rate": cached / max(prompts, 1),
        "preemptions": sum(own.engine.scheduler.preemptions for own in every),
        "prompt_tokens": prompts,
        "generated_tokens": generated,
        "steps": dict(sorted(sum((Counter(meter.steps) for meter in meters), Counter[str]()).items())),
        "cache_pages": sum(own.sizes.shards * sum(own.sizes.pages) for own in every),
        "page_size": parts[0].sizes.page_size,
    }

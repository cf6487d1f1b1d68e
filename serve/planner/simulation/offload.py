"""KV offload and disaggregated prefill in simulated time: pages without content over links that take their
time, by the engine's own rules of what is kept and fetched."""

import heapq
import math
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ....kvcache.tables import PageTables, SequenceTables
from ...kv.offload.host import HostTier
from ...kv.offload.mover import MIN_RATE_FETCHES, RATE_FETCHES, PageFetch, PageMover
from ...kv.offload.page_finder import PAGE_WAIT_SECONDS, KVOffloader, PoolPageFinder
from ...kv.offload.tier import PageKey, key_window
from ...runtime.compiled.transfers import MAX_OFFERED_PAGES
from .device import SimulatedClock
from .engine_simulation import Simulation


@dataclass
class SimulatedLink:
    """A link that sends pages one after the other. Its user chooses the unit of data: a token's keys, or a
    byte.

    seconds_per_unit: seconds to send one unit.
    free_at: moment from which nothing is sent.
    """

    seconds_per_unit: float = 0.0
    free_at: float = 0.0

    def send(self, moment: float, units: int) -> float:
        """Send a number of units from a moment on, and return the moment when they arrive."""
        self.free_at = max(moment, self.free_at) + units * self.seconds_per_unit
        return self.free_at


# ---------------------------------------------------------------- disaggregated prefill


class SimulatedRemotePages(PoolPageFinder):
    """Page finder of a decode engine. A prompt enters the queue when all of its pages have arrived. Prompts
    that lose their pages later are computed by this engine."""

    def __init__(self, tables: PageTables):
        super().__init__(tables)
        self._remote_hashes: set[bytes] = set()

    def start_remote_prefill(
        self, prompt: Sequence[int], hashes: Sequence[bytes], address: str | None = None, salt: bytes = b""
    ) -> PageFetch | None:
        self._remote_hashes.update(hashes)
        return None

    def find_prefix(self, hashes: Sequence[bytes], page_fetch: PageFetch | None) -> SequenceTables:
        return self.tables.find_prefix(hashes, lambda group, page_hash: page_hash in self._remote_hashes)

    def find_or_fetch_prefix(
        self, hashes: Sequence[bytes], page_fetch: PageFetch | None
    ) -> tuple[SequenceTables | None, PageFetch | None]:
        return self.find_prefix(hashes, page_fetch), page_fetch

    def assign_pool_pages(
        self,
        prefix: SequenceTables,
        hashes: Sequence[bytes],
        pages: SequenceTables,
        page_fetch: PageFetch | None,
    ) -> None:
        self._remote_hashes.difference_update(hashes[: len(prefix[0])])


def attach_remote_pages(simulations: Iterable[Simulation]) -> None:
    """Let engines find the pages that prefill engines have computed for them."""
    for simulation in simulations:
        simulation.engine.scheduler.page_finder = SimulatedRemotePages(simulation.engine.tables)


# ---------------------------------------------------------------- pages in the host's memory


@dataclass(frozen=True)
class BlankPage:
    """A page without content, of `nbytes` bytes."""

    nbytes: int

    def __len__(self) -> int:
        return self.nbytes


@dataclass(frozen=True)
class BlankTransfers:
    """Page copies that copy nothing.

    page_bytes: bytes of a page of each window.
    """

    page_bytes: Sequence[int]

    def gather(self, cache: Any, window: int, pages: Sequence[int]) -> tuple[()]:
        return ()

    def scatter(self, cache: Any, window: int, leaves: tuple[()], pages: Sequence[int | None]) -> Any:
        return cache


@dataclass(eq=False)
class SimulatedMover:
    """Page mover of a `KVOffloader`. Pages leave over one link and return over another. A page that is
    leaving can be fetched already.

    seconds_per_byte: seconds to send a byte.
    rates: seconds per byte of the latest fetches.
    """

    tier: HostTier
    transfers: BlankTransfers
    clock: SimulatedClock
    seconds_per_byte: float
    remote_kv: None = None
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=RATE_FETCHES))

    def __post_init__(self):
        self._outbound, self._inbound = (
            SimulatedLink(self.seconds_per_byte),
            SimulatedLink(self.seconds_per_byte),
        )
        self._arrivals: list[tuple[float, int, PageFetch, list[PageKey]]] = []
        self._count = 0

    @property
    def byte_seconds(self) -> float | None:
        return statistics.median(self.rates) if len(self.rates) >= MIN_RATE_FETCHES else None

    def has(self, key: PageKey) -> bool:
        return self.tier.has(key)

    def has_room(self, window: int, num_pages: int) -> bool:
        waiting = (self._outbound.free_at - self.clock()) / self.seconds_per_byte
        return waiting <= (MAX_OFFERED_PAGES - num_pages) * self.transfers.page_bytes[window]

    def offer(self, keys: Sequence[PageKey], leaves: tuple[()]) -> None:
        self._outbound.send(self.clock(), self._keys_bytes(keys))
        for key in keys:
            self.tier.offer(key, cast(bytes, BlankPage(self._keys_bytes([key]))))

    def start_fetch(self, keys: Sequence[PageKey], page_fetch: PageFetch, patience_seconds: float) -> None:
        """Fetch pages, the last first, as `PageMover` does."""
        stored_keys = [key for key in reversed(keys) if self.tier.fetch(key) is not None]
        size = self._keys_bytes(stored_keys)
        arrival = self._inbound.send(self.clock(), size)
        if size:
            self.rates.append((arrival - self.clock()) / size)
        page_fetch.round_done, page_fetch.deadline = threading.Event(), math.inf
        page_fetch.rounds, self._count = page_fetch.rounds + 1, self._count + 1
        heapq.heappush(self._arrivals, (arrival, self._count, page_fetch, stored_keys))

    def release_fetch(self, page_fetch: PageFetch) -> None:
        page_fetch.is_dropped, page_fetch.parts = True, []

    def deliver(self) -> None:
        """Deliver the pages that have arrived by now."""
        while self._arrivals and self._arrivals[0][0] <= self.clock():
            _, _, page_fetch, keys = heapq.heappop(self._arrivals)
            assert page_fetch.round_done is not None
            page_fetch.parts += [([key], ()) for key in keys if not page_fetch.is_dropped]
            page_fetch.round_done.set()

    def wait_for_arrival(self, seconds: float) -> None:
        """Advance the clock until a page arrives, or by `seconds`."""
        if self._arrivals:
            self.clock.wait_until(min(self._arrivals[0][0], self.clock() + seconds))

    def _keys_bytes(self, keys: Sequence[PageKey]) -> int:
        return sum(self.transfers.page_bytes[key_window(key)] for key in keys)


class SimulatedOffloader(KVOffloader):
    """Page finder with the engine's tiers, whose pages arrive in simulated time."""

    def __init__(self, mover: SimulatedMover, tables: PageTables, token_seconds: Callable[[], float | None]):
        super().__init__(cast(PageMover, mover), tables, token_seconds)
        self.simulated_mover = mover

    def find_or_fetch_prefix(
        self, hashes: Sequence[bytes], page_fetch: PageFetch | None
    ) -> tuple[SequenceTables | None, PageFetch | None]:
        self.simulated_mover.deliver()
        return super().find_or_fetch_prefix(hashes, page_fetch)

    def wait_for_pages(self) -> None:
        self.simulated_mover.wait_for_arrival(PAGE_WAIT_SECONDS)


def attach_host_pages(
    simulation: Simulation, max_bytes: int, page_bytes: Sequence[int], bandwidth: float
) -> None:
    """Let an engine keep `max_bytes` bytes of pages in the host's memory, over a link of `bandwidth`
    bytes/s."""
    mover = SimulatedMover(HostTier(max_bytes), BlankTransfers(page_bytes), simulation.clock, 1 / bandwidth)
    stats = simulation.engine.stats
    simulation.engine.scheduler.page_finder = SimulatedOffloader(
        mover, simulation.engine.tables, stats.prefill_token_seconds
    )

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

from ....kvcache.tables import PageTables, Tables
from ...kv.offload.host import HostTier
from ...kv.offload.mover import FETCHES, FEWEST, PageFetch, PageMover
from ...kv.offload.tier import Key, window_of
from ...kv.offload.tiering import PAUSE, KVOffloader, NoOffload
from ...runtime.compiled.transfers import OFFERED
from .device import SimulatedClock
from .run import Simulation


@dataclass
class SimulatedLink:
    """A link on which pages are sent one after the other; a token's keys take `token_seconds`."""

    token_seconds: float = 0.0
    free: float = 0.0

    def carried(self, moment: float, tokens: int) -> float:
        """Return when the keys of `tokens` tokens arrive that are sent from a moment on."""
        self.free = max(moment, self.free) + tokens * self.token_seconds
        return self.free


# ---------------------------------------------------------------- disaggregated prefill


class SimulatedRemotePages(NoOffload):
    """Page finder of a decode engine. A prompt enters the queue when all of its pages have arrived. Prompts
    that lose their pages later are computed here."""

    def __init__(self, tables: PageTables):
        super().__init__(tables)
        self._there: set[bytes] = set()

    def expect(
        self, prompt: Sequence[int], names: Sequence[bytes], source: str | None = None
    ) -> PageFetch | None:
        self._there.update(names)
        return None

    def find(self, names: Sequence[bytes], ticket: PageFetch | None) -> Tables:
        return self.tables.find(names, lambda group, name: name in self._there)

    def look(
        self, names: Sequence[bytes], ticket: PageFetch | None
    ) -> tuple[Tables | None, PageFetch | None]:
        return self.find(names, ticket), ticket

    def admit(
        self,
        found: Tables,
        names: Sequence[bytes],
        tokens: Sequence[int],
        pages: Tables,
        ticket: PageFetch | None,
    ) -> None:
        own = names[: len(found[0])]
        self.tables.name(pages, own, 0, tokens)
        self._there.difference_update(own)


def handed_to(simulations: Iterable[Simulation]) -> None:
    """Let engines find the pages that were computed for them."""
    for own in simulations:
        own.engine.scheduler.tiers = SimulatedRemotePages(own.engine.tables)


# ---------------------------------------------------------------- pages in the host's memory


@dataclass(frozen=True)
class BlankPage:
    """A page without content."""

    nbytes: int

    def __len__(self) -> int:
        return self.nbytes


@dataclass(frozen=True)
class Copies:
    """Page copies that copy nothing; `page_bytes` of each window."""

    page_bytes: Sequence[int]

    def gather(self, cache: Any, window: int, pages: Sequence[int]) -> tuple[()]:
        return ()

    def scatter(self, cache: Any, window: int, leaves: tuple[()], pages: Sequence[int | None]) -> Any:
        return cache


@dataclass(eq=False)
class SimulatedMover:
    """Page mover of a `KVOffloader`. Pages go out and come back over two links. Pages on their way out can be
    fetched already."""

    tier: HostTier
    transfers: Copies
    clock: SimulatedClock
    seconds: float  # of a byte
    peer: None = None
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=FETCHES))

    def __post_init__(self):
        self._out, self._back = SimulatedLink(self.seconds), SimulatedLink(self.seconds)
        self._coming: list[tuple[float, int, PageFetch, list[Key]]] = []
        self._count = 0

    @property
    def byte_seconds(self) -> float | None:
        return statistics.median(self.rates) if len(self.rates) >= FEWEST else None

    def has(self, key: Key) -> bool:
        return self.tier.has(key)

    def has_room(self, window: int, pages: int) -> bool:
        waiting = (self._out.free - self.clock()) / self.seconds
        return waiting <= (OFFERED - pages) * self.transfers.page_bytes[window]

    def offer(self, keys: Sequence[Key], leaves: tuple[()]) -> None:
        self._out.carried(self.clock(), self._bytes(keys))
        for key in keys:
            self.tier.offer(key, cast(bytes, BlankPage(self._bytes([key]))))

    def fetch(self, keys: Sequence[Key], ticket: PageFetch, patience: float) -> None:
        """The last pages first, as a mover does."""
        found = [key for key in reversed(keys) if self.tier.fetch(key) is not None]
        size = self._bytes(found)
        at = self._back.carried(self.clock(), size)
        if size:
            self.rates.append((at - self.clock()) / size)
        ticket.pending, ticket.until = threading.Event(), math.inf
        ticket.rounds, self._count = ticket.rounds + 1, self._count + 1
        heapq.heappush(self._coming, (at, self._count, ticket, found))

    def taken(self, ticket: PageFetch) -> None:
        ticket.dropped, ticket.parts = True, []

    def deliver(self) -> None:
        """Deliver the pages that have arrived by now."""
        while self._coming and self._coming[0][0] <= self.clock():
            _, _, ticket, keys = heapq.heappop(self._coming)
            assert ticket.pending is not None
            ticket.parts += [([key], ()) for key in keys if not ticket.dropped]
            ticket.pending.set()

    def wait(self, seconds: float) -> None:
        """Advance the clock until a page arrives, or by `seconds`."""
        if self._coming:
            self.clock.wait_until(min(self._coming[0][0], self.clock() + seconds))

    def _bytes(self, keys: Sequence[Key]) -> int:
        return sum(self.transfers.page_bytes[window_of(key)] for key in keys)


class SimulatedOffloader(KVOffloader):
    """The engine's tiers, whose pages come as simulated time passes."""

    def __init__(self, moved: SimulatedMover, tables: PageTables, token_seconds: Callable[[], float | None]):
        super().__init__(cast(PageMover, moved), tables, token_seconds)
        self.moved = moved

    def look(
        self, names: Sequence[bytes], ticket: PageFetch | None
    ) -> tuple[Tables | None, PageFetch | None]:
        self.moved.deliver()
        return super().look(names, ticket)

    def pause(self) -> None:
        self.moved.wait(PAUSE)


def swap(own: Simulation, most_bytes: int, page_bytes: Sequence[int], bandwidth: float) -> None:
    """Let an engine keep `most_bytes` of pages in the host's memory, over a link of `bandwidth` bytes/s."""
    mover = SimulatedMover(HostTier(most_bytes), Copies(page_bytes), own.clock, 1 / bandwidth)
    meter = own.engine.meter
    own.engine.scheduler.tiers = SimulatedOffloader(mover, own.engine.tables, meter.token_seconds)

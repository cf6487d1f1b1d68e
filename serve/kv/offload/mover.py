"""Carries pages between leaves on the device and a tier, in a thread of its own.

The engine's thread dispatches a gather of pages and goes on: their copy to the host waits for the device, not
the other way round. Back, the thread puts leaves on the device while other requests' steps run.
"""

import itertools
import queue
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...host.streams import warn
from ...runtime.compiled.transfers import (
    MOST,
    OFFERED,
    STAGED,
    Leaves,
    Transfers,
    contents,
    count_for,
    filled,
)
from .peer import RemoteKV, RemotePrefill
from .tier import Key, TierChain, window_of

FETCHES = 16  # whose rates are remembered, the latest
FEWEST = 3  # that say how long one takes
REFRESH = 2.0  # seconds without work after which a tier looks for what others have kept
END = 10.0  # seconds that the end of an engine waits for its mover


@dataclass(eq=False)
class PageFetch:
    """Pages that a request waits for. `parts` are those that have arrived; at its admission `places` says
    into which pages they go."""

    ask: RemotePrefill | None = None  # of the engine that computes the prompt, where it is another
    rounds: int = 0  # how often pages were asked for
    pages: int = 0
    until: float = 0.0  # the time when nobody waits any more
    pending: threading.Event | None = None  # of the last round
    parts: list[tuple[list[Key], Leaves]] = field(default_factory=list)
    staged: int = 0  # of their pages on the device
    places: dict[Key, int] = field(default_factory=dict)
    dropped: bool = False  # nobody wants it

    @property
    def is_late(self) -> bool:
        """Whether pages have not arrived in time."""
        return self._is_open and time.monotonic() > self.until

    @property
    def is_pending(self) -> bool:
        """Whether pages may still arrive in time."""
        return self._is_open and time.monotonic() <= self.until

    @property
    def _is_open(self) -> bool:
        return self.pending is not None and not self.pending.is_set()

    @property
    def arrived(self) -> set[Key]:
        return {key for keys, _ in self.parts for key in keys}


Job = Callable[[], None]


class MoverQueue:
    """What a mover has to do, in order, but what somebody waits for goes first."""

    def __init__(self):
        self._jobs: queue.PriorityQueue[tuple[bool, int, Job | None]] = queue.PriorityQueue()
        self._count = itertools.count()

    def __len__(self) -> int:
        return self._jobs.qsize()

    def put(self, job: Job | None, awaited: bool = False) -> None:
        self._jobs.put((not awaited, next(self._count), job))

    def get(self, timeout: float | None = None) -> Job | None:
        """Raises queue.Empty after so many seconds."""
        return self._jobs.get(timeout=timeout)[-1]


class PageMover:
    """Offers pages to a tier and fetches from it, one job at a time; `reopen` gives a tier for the pages of
    other parameters.

    Pages that are on their way to the tier are there already for whoever asks. Beyond OFFERED of them no more
    are taken, since a page that is nowhere is computed again; beyond STAGED what was fetched waits in the
    host's memory for its step. A `peer` among the tiers computes prompts for this engine.
    """

    def __init__(
        self,
        tier: TierChain,
        transfers: Transfers,
        reopen: Callable[[Any], TierChain],
        peer: RemoteKV | None = None,
    ):
        self.tier, self.transfers, self.reopen, self.peer = tier, transfers, reopen, peer
        self._rates: deque[float] = deque(maxlen=FETCHES)  # seconds a byte, as those waited who asked
        self._offered, self._staged = [0 for _ in transfers.windows], 0  # pages, with those that pad leaves
        self._refreshed = time.monotonic()
        self._coming: dict[Key, int] = {}  # offered, and not in the tier yet
        self._lock = threading.Lock()
        self._jobs = MoverQueue()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._work, name="duetto-mover", daemon=True)
        self._thread.start()

    @property
    def byte_seconds(self) -> float | None:
        """Of a byte that is fetched, the median of the last fetches: one that the machine delayed says
        little. None before there were some."""
        return statistics.median(self._rates) if len(self._rates) >= FEWEST else None

    def has(self, key: Key) -> bool:
        return key in self._coming or self.tier.has(key)

    def has_room(self, window: int, pages: int) -> bool:
        """Whether so many pages of a window may be offered now."""
        return self._offered[window] + count_for(pages) <= OFFERED

    def offer(self, keys: Sequence[Key], leaves: Leaves) -> None:
        """Keep the first pages of leaves of one window, which are nobody else's."""
        with self._lock:
            self._offered[window_of(keys[0])] += count_for(len(keys))
            for key in keys:
                self._coming[key] = self._coming.get(key, 0) + 1
        self._jobs.put(lambda: self._keep(keys, leaves))

    def fetch(self, keys: Sequence[Key], ticket: PageFetch, patience: float) -> None:
        """Bring pages to the device, for as many seconds as somebody waits: before others are kept, unless
        they are among these."""
        done = threading.Event()
        ticket.pending, ticket.until = done, time.monotonic() + patience
        ticket.rounds += 1
        asked = time.perf_counter()
        with self._lock:
            here = self._coming.keys().isdisjoint(keys)
        self._jobs.put(lambda: self._bring(keys, ticket, done, asked), awaited=here)

    def taken(self, ticket: PageFetch) -> None:
        """A request has its pages, or wants them no more."""
        if self.peer is not None and ticket.ask is not None:
            self.peer.release(ticket.ask)
        with self._lock:
            ticket.dropped = True
            self._staged -= ticket.staged
            ticket.staged, ticket.parts = 0, []

    def replaced(self, params: Any) -> None:
        """Other parameters are served from now on, whose pages `reopen` finds a tier for."""
        self.wait()
        self.tier = TierChain([])  # whatever happens: names say nothing of the weights
        self.tier = self.reopen(params)

    def wait(self) -> None:
        """Until all that was asked so far is done."""
        done = threading.Event()
        self.then(done.set)
        done.wait()

    def then(self, job: Job) -> None:
        """Do something in its thread once all that was asked so far is done."""
        self._jobs.put(job)

    def close(self) -> None:
        """Do what was asked, and end."""
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(END)

    # ------------------------------------------------------------ in its thread

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=REFRESH)
            except queue.Empty:
                job = self._refresh
            if job is None:
                return
            try:
                job()
                self._refresh()
            except Exception as error:  # noqa: BLE001 - a page that does not arrive is computed again
                warn(f"pages were not moved: {type(error).__name__}: {error}")
            del job  # its leaves

    def _refresh(self) -> None:
        """See what others have kept, also where there is always something to do."""
        if time.monotonic() - self._refreshed > REFRESH:
            self.tier.refresh()
            self._refreshed = time.monotonic()

    def _keep(self, keys: Sequence[Key], leaves: Leaves) -> None:
        try:
            for key, content in zip(keys, contents(leaves, len(keys)), strict=True):
                self.tier.offer(key, content)
        finally:
            with self._lock:
                self._offered[window_of(keys[0])] -= count_for(len(keys))
                for key in keys:
                    self._coming[key] -= 1
                    if not self._coming[key]:
                        del self._coming[key]

    def _bring(self, keys: Sequence[Key], ticket: PageFetch, done: threading.Event, asked: float) -> None:
        """The last pages first: a tier keeps those longest that it has fetched last, and a prefix ends where
        one lacks. What others' pages take before these counts too."""
        size = 0
        try:
            for window in self.transfers.windows:
                own = [key for key in reversed(keys) if window_of(key) == window]
                for i in range(0, len(own), MOST):
                    if not ticket.dropped:
                        size += self._bring_part(window, own[i : i + MOST], ticket)
        finally:
            if size:
                self._rates.append((time.perf_counter() - asked) / size)
            done.set()

    def _bring_part(self, window: int, keys: Sequence[Key], ticket: PageFetch) -> int:
        """Gives the bytes of what was there."""
        found = {key: content for key in keys if (content := self.tier.fetch(key)) is not None}
        if not found:
            return 0
        n = count_for(len(found))
        leaves = filled(self.transfers.leaves(window, n), list(found.values()))
        if self._stage(n, ticket):
            leaves = self.transfers.put(window, leaves)
        with self._lock:
            if not ticket.dropped:
                ticket.parts.append((list(found), leaves))
        return len(found) * self.transfers.page_bytes[window]

    def _stage(self, pages: int, ticket: PageFetch) -> bool:
        with self._lock:
            fits = not ticket.dropped and self._staged + pages <= STAGED
            self._staged += pages if fits else 0
            ticket.staged += pages if fits else 0
            return fits

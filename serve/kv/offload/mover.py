"""Thread that moves pages between the device and the tiers of KV offload.

The engine's thread dispatches a gather of pages and goes on; this thread waits for the copy to the host. In
the other direction it puts pages on the device while steps of other requests run.
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

FETCHES = 16  # last fetches whose rates are kept
FEWEST = 3  # fetches before which no rate is known
REFRESH = 2.0  # seconds between two looks for pages that other processes have stored
END = 10.0  # seconds that the end of an engine waits for this thread


@dataclass(eq=False)
class PageFetch:
    """Pages that a request waits for.

    parts: pages that have arrived, with their leaves.
    places: page of the pool for each key, set when the request is admitted.
    """

    ask: RemotePrefill | None = None  # where another engine computes the prompt
    rounds: int = 0  # number of times that pages were requested
    pages: int = 0
    until: float = 0.0  # time (monotonic clock) when waiting ends
    pending: threading.Event | None = None  # of the last round
    parts: list[tuple[list[Key], Leaves]] = field(default_factory=list)
    staged: int = 0  # pages of `parts` on the device
    places: dict[Key, int] = field(default_factory=dict)
    dropped: bool = False  # not wanted any more
    now: Callable[[], float] = time.monotonic  # returns the time

    @property
    def is_late(self) -> bool:
        """True where pages have not arrived in time."""
        return self._is_open and self.now() > self.until

    @property
    def is_pending(self) -> bool:
        """True where pages may still arrive in time."""
        return self._is_open and self.now() <= self.until

    @property
    def _is_open(self) -> bool:
        return self.pending is not None and not self.pending.is_set()

    @property
    def arrived(self) -> set[Key]:
        return {key for keys, _ in self.parts for key in keys}


Job = Callable[[], None]


class MoverQueue:
    """Jobs of a mover, first in first out; those that a request waits for come before all others."""

    def __init__(self):
        self._jobs: queue.PriorityQueue[tuple[bool, int, Job | None]] = queue.PriorityQueue()
        self._count = itertools.count()

    def __len__(self) -> int:
        return self._jobs.qsize()

    def put(self, job: Job | None, awaited: bool = False) -> None:
        self._jobs.put((not awaited, next(self._count), job))

    def get(self, timeout: float | None = None) -> Job | None:
        """Return the next job. Raises queue.Empty after `timeout` seconds."""
        return self._jobs.get(timeout=timeout)[-1]


class PageMover:
    """Offers pages to a chain of tiers and fetches from it, one job at a time; `reopen` makes a chain for the
    pages of other parameters.

    `has` counts pages that are on their way to the tiers. Beyond OFFERED of them new pages are dropped, since
    a page that is in no tier can be computed again; beyond STAGED pages on the device, fetched pages wait in
    the host's memory for their step. A `peer` among the tiers computes prompts for this engine. `clock`
    returns seconds.
    """

    def __init__(
        self,
        tier: TierChain,
        transfers: Transfers,
        reopen: Callable[[Any], TierChain],
        peer: RemoteKV | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.clock = clock
        self.tier, self.transfers, self.reopen, self.peer = tier, transfers, reopen, peer
        self._rates: deque[float] = deque(maxlen=FETCHES)  # seconds a byte, from the request to the arrival
        self._offered, self._staged = [0 for _ in transfers.windows], 0  # pages, with those that pad leaves
        self._refreshed = clock()
        self._coming: dict[Key, int] = {}  # offered, and not in the tier yet
        self._lock = threading.Lock()
        self._jobs = MoverQueue()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        self._thread = threading.Thread(target=self._work, name="duetto-mover", daemon=True)
        self._thread.start()

    @property
    def byte_seconds(self) -> float | None:
        """Seconds to fetch a byte, the median of the last fetches, since a single one may have been
        delayed by the machine. None before FEWEST fetches."""
        return statistics.median(self._rates) if len(self._rates) >= FEWEST else None

    def has(self, key: Key) -> bool:
        return key in self._coming or self.tier.has(key)

    def has_room(self, window: int, pages: int) -> bool:
        """Return whether `pages` pages of a window may be offered now."""
        return self._offered[window] + count_for(pages) <= OFFERED

    def offer(self, keys: Sequence[Key], leaves: Leaves) -> None:
        """Store the first pages of leaves of one window; the leaves belong to the mover from now on."""
        with self._lock:
            self._offered[window_of(keys[0])] += count_for(len(keys))
            for key in keys:
                self._coming[key] = self._coming.get(key, 0) + 1
        self._jobs.put(lambda: self._keep(keys, leaves))

    def fetch(self, keys: Sequence[Key], ticket: PageFetch, patience: float) -> None:
        """Bring pages to the device; the request waits at most `patience` seconds. The fetch overtakes
        pages to be stored, unless it wants one of them."""
        done = threading.Event()
        asked = self.clock()
        ticket.pending, ticket.until, ticket.now = done, asked + patience, self.clock
        ticket.rounds += 1
        with self._lock:
            here = self._coming.keys().isdisjoint(keys)
        self._jobs.put(lambda: self._bring(keys, ticket, done, asked), awaited=here)

    def taken(self, ticket: PageFetch) -> None:
        """Free what a fetch holds: the request has its pages, or does not want them any more."""
        if self.peer is not None and ticket.ask is not None:
            self.peer.release(ticket.ask)
        with self._lock:
            ticket.dropped = True
            self._staged -= ticket.staged
            ticket.staged, ticket.parts = 0, []

    def replaced(self, params: Any) -> None:
        """Use the tiers for the pages of other parameters."""
        self.wait()
        self.tier = TierChain([])  # even if `reopen` fails: names do not depend on the weights
        self.tier = self.reopen(params)

    def wait(self) -> None:
        """Wait until all jobs so far are done."""
        done = threading.Event()
        self.then(done.set)
        done.wait()

    def then(self, job: Job) -> None:
        """Run a job in this thread once all jobs so far are done."""
        self._jobs.put(job)

    def close(self) -> None:
        """Finish all jobs and end the thread, in at most END seconds."""
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
            self.run(job)
            del job  # its leaves

    def run(self, job: Job) -> None:
        """Run a job, and look for pages of other processes. Errors are warnings: a page that does not arrive
        is computed again."""
        try:
            job()
            self._refresh()
        except Exception as error:  # noqa: BLE001
            warn(f"pages were not moved: {type(error).__name__}: {error}")

    def _refresh(self) -> None:
        """Look for pages of other processes, also where there is always a job."""
        if self.clock() - self._refreshed > REFRESH:
            self.tier.refresh()
            self._refreshed = self.clock()

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
        """Fetch the last pages first: an LRU tier keeps those longest that were fetched last, and a prefix
        ends at its first missing page. The rate includes the wait for earlier jobs."""
        size = 0
        try:
            for window in self.transfers.windows:
                own = [key for key in reversed(keys) if window_of(key) == window]
                for i in range(0, len(own), MOST):
                    if not ticket.dropped:
                        size += self._bring_part(window, own[i : i + MOST], ticket)
        finally:
            if size:
                self._rates.append((self.clock() - asked) / size)
            done.set()

    def _bring_part(self, window: int, keys: Sequence[Key], ticket: PageFetch) -> int:
        """Fetch pages of one window; returns the bytes of those that were found."""
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

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

from ...host.streams import warn_once
from ...runtime.compiled.transfers import (
    MAX_COPY_PAGES,
    MAX_OFFERED_PAGES,
    MAX_STAGED_PAGES,
    PageLeaves,
    Transfers,
    fill_leaves,
    padded_count,
    page_contents,
)
from .remote_kv import RemoteKV, RemotePrefill
from .tier import PageKey, TierChain, key_window

RATE_FETCHES = 16  # number of last fetches whose rates are kept
MIN_RATE_FETCHES = 3  # number of fetches from which on their rate is reported
REFRESH_SECONDS = 2.0  # seconds between two refreshes of the tiers, which find the pages of other processes
CLOSE_TIMEOUT_SECONDS = 10.0  # seconds that the end of an engine waits for this thread, at most


@dataclass(eq=False)
class PageFetch:
    """Fetch of the pages that a request waits for.

    prefill: prefill that another engine computes, if there is one.
    rounds: number of times that pages were requested.
    num_pages: number of pages requested in the last round.
    deadline: time when waiting ends, seconds of `now`.
    round_done: set when the last round is over; None before the first.
    parts: keys and leaves of pages that have arrived.
    staged_pages: number of pages of `parts` that are on the device, padding included.
    pool_pages: page of the pool for each key, set when the request is admitted.
    is_dropped: True once the request does not want the pages any more.
    now: returns the time, seconds.
    """

    prefill: RemotePrefill | None = None
    rounds: int = 0
    num_pages: int = 0
    deadline: float = 0.0
    round_done: threading.Event | None = None
    parts: list[tuple[list[PageKey], PageLeaves]] = field(default_factory=list)
    staged_pages: int = 0
    pool_pages: dict[PageKey, int] = field(default_factory=dict)
    is_dropped: bool = False
    now: Callable[[], float] = time.monotonic

    @property
    def is_late(self) -> bool:
        """True if the last round is not over, and its time is."""
        return self._is_round_running and self.now() > self.deadline

    @property
    def is_pending(self) -> bool:
        """True if pages may still arrive in time."""
        return self._is_round_running and self.now() <= self.deadline

    @property
    def _is_round_running(self) -> bool:
        """True while the last round is not over."""
        return self.round_done is not None and not self.round_done.is_set()

    @property
    def arrived_keys(self) -> set[PageKey]:
        """Keys of the pages that have arrived."""
        return {key for keys, _ in self.parts for key in keys}


MoverJob = Callable[[], None]


class MoverQueue:
    """Jobs of a mover: urgent jobs, which a request waits for, come first; then first in, first out."""

    def __init__(self):
        self._jobs: queue.PriorityQueue[tuple[bool, int, MoverJob | None]] = queue.PriorityQueue()
        self._count = itertools.count()

    def __len__(self) -> int:
        return self._jobs.qsize()

    def put(self, job: MoverJob | None, is_urgent: bool = False) -> None:
        """Queue a job, which is urgent if a request waits for it (`is_urgent`). None ends the mover."""
        self._jobs.put((not is_urgent, next(self._count), job))

    def get(self, timeout: float | None = None) -> MoverJob | None:
        """Return the next job. Raises queue.Empty after `timeout` seconds."""
        return self._jobs.get(timeout=timeout)[-1]


class PageMover:
    """Thread that offers pages to a chain of tiers and fetches pages from it, one job at a time.

    Pages on their way to the tiers can be found already. If `MAX_OFFERED_PAGES` pages of a window are on
    their way, new pages are dropped: a page that is in no tier can be computed again. If `MAX_STAGED_PAGES`
    pages are on the device, fetched pages wait in the host's memory for their step.

    tier: the chain of tiers.
    transfers: copies between the device and the host.
    reopen_tiers: makes the chain for the pages of other parameters.
    remote_kv: tier of the prefill engines that compute prompts for this engine, if there are any.
    clock: returns seconds.
    """

    def __init__(
        self,
        tier: TierChain,
        transfers: Transfers,
        reopen_tiers: Callable[[Any], TierChain],
        remote_kv: RemoteKV | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.clock = clock
        self.tier, self.transfers, self.reopen_tiers, self.remote_kv = (
            tier,
            transfers,
            reopen_tiers,
            remote_kv,
        )
        # seconds a byte, from the request to the arrival
        self.fetch_rates: deque[float] = deque(maxlen=RATE_FETCHES)
        self.offered_pages, self.staged_pages = [0 for _ in transfers.windows], 0  # pages, padding included
        self._refresh_time = clock()
        # number of offers of each key that are not in the tiers yet
        self.pending_offers: dict[PageKey, int] = {}
        self._lock = threading.Lock()
        self._jobs = MoverQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run_jobs, name="duetto-page-mover", daemon=True)
        self._thread.start()

    @property
    def byte_seconds(self) -> float | None:
        """Seconds to fetch a byte; None before `MIN_RATE_FETCHES` fetches. The median of the last fetches:
        the machine may have delayed a single one."""
        return statistics.median(self.fetch_rates) if len(self.fetch_rates) >= MIN_RATE_FETCHES else None

    def has(self, key: PageKey) -> bool:
        return key in self.pending_offers or self.tier.has(key)

    def has_room(self, window: int, num_pages: int) -> bool:
        """Return True if `num_pages` pages of a window may be offered now."""
        return self.offered_pages[window] + padded_count(num_pages) <= MAX_OFFERED_PAGES

    def offer(self, keys: Sequence[PageKey], leaves: PageLeaves) -> None:
        """Store the first pages of one window's leaves under `keys`. The mover owns the leaves from now
        on."""
        with self._lock:
            self.offered_pages[key_window(keys[0])] += padded_count(len(keys))
            for key in keys:
                self.pending_offers[key] = self.pending_offers.get(key, 0) + 1
        self._jobs.put(lambda: self._store_pages(keys, leaves))

    def start_fetch(self, keys: Sequence[PageKey], page_fetch: PageFetch, patience_seconds: float) -> None:
        """Start to fetch pages to the device; the request waits at most `patience_seconds` seconds. The fetch
        overtakes queued offers, unless it wants a page of one of them."""
        done = threading.Event()
        start = self.clock()
        page_fetch.round_done = done
        page_fetch.deadline = start + patience_seconds
        page_fetch.now = self.clock
        page_fetch.rounds += 1
        with self._lock:
            is_urgent = self.pending_offers.keys().isdisjoint(keys)
        self._jobs.put(lambda: self._fetch_pages(keys, page_fetch, done, start), is_urgent=is_urgent)

    def release_fetch(self, page_fetch: PageFetch) -> None:
        """Release the staged pages and the prefill of a fetch, whose request has its pages or was dropped."""
        if self.remote_kv is not None and page_fetch.prefill is not None:
            self.remote_kv.release_prefill(page_fetch.prefill)
        with self._lock:
            page_fetch.is_dropped = True
            self.staged_pages -= page_fetch.staged_pages
            page_fetch.staged_pages, page_fetch.parts = 0, []

    def on_weights_replaced(self, params: Any) -> None:
        """Open the tiers again, for the pages of other parameters."""
        self.wait_for_jobs()
        # if `reopen` fails, no old page is found: page hashes do not depend on weights
        self.tier = TierChain([])
        self.tier = self.reopen_tiers(params)

    def wait_for_jobs(self) -> None:
        """Wait until all jobs that are queued now are done."""
        done = threading.Event()
        self.submit_job(done.set)
        done.wait()

    def submit_job(self, job: MoverJob) -> None:
        """Queue a job, which the mover's thread runs after all jobs that are queued now."""
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread once all queued jobs are done; waits at most `CLOSE_TIMEOUT_SECONDS` for it."""
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(CLOSE_TIMEOUT_SECONDS)

    # ------------------------------------------------------------ in its thread

    def _run_jobs(self) -> None:
        """Run jobs until None is queued, and refresh the tiers if there are none."""
        while True:
            try:
                job = self._jobs.get(timeout=REFRESH_SECONDS)
            except queue.Empty:
                job = self._refresh
            if job is None:
                return
            self.run_job(job)
            del job  # frees its leaves while the thread waits for the next job

    def run_job(self, job: MoverJob) -> None:
        """Run a job, and refresh the tiers if it is time. Log errors as warnings: a page that does not arrive
        is computed again."""
        try:
            job()
            self._refresh()
        except Exception as error:  # noqa: BLE001
            warn_once(f"pages were not moved: {type(error).__name__}: {error}")

    def _refresh(self) -> None:
        """Refresh the tiers if `REFRESH_SECONDS` have passed: this finds the pages of other processes."""
        if self.clock() - self._refresh_time > REFRESH_SECONDS:
            self.tier.refresh()
            self._refresh_time = self.clock()

    def _store_pages(self, keys: Sequence[PageKey], leaves: PageLeaves) -> None:
        """Offer the first pages of leaves to the tiers, and release their room."""
        try:
            for key, content in zip(keys, page_contents(leaves, len(keys)), strict=True):
                self.tier.offer(key, content)
        finally:
            with self._lock:
                self.offered_pages[key_window(keys[0])] -= padded_count(len(keys))
                for key in keys:
                    self.pending_offers[key] -= 1
                    if not self.pending_offers[key]:
                        del self.pending_offers[key]

    def _fetch_pages(
        self, keys: Sequence[PageKey], page_fetch: PageFetch, done: threading.Event, start: float
    ) -> None:
        """Fetch pages of all windows, the last pages first, and set `done`.

        An LRU tier evicts the pages first that were fetched first, and a prefix ends at its first missing
        page. The rate of the fetch includes the wait for earlier jobs.
        """
        size = 0
        try:
            for window in self.transfers.windows:
                window_keys = [key for key in reversed(keys) if key_window(key) == window]
                for i in range(0, len(window_keys), MAX_COPY_PAGES):
                    if not page_fetch.is_dropped:
                        size += self._fetch_window_pages(
                            window, window_keys[i : i + MAX_COPY_PAGES], page_fetch
                        )
        finally:
            if size:
                self.fetch_rates.append((self.clock() - start) / size)
            done.set()

    def _fetch_window_pages(self, window: int, keys: Sequence[PageKey], page_fetch: PageFetch) -> int:
        """Fetch pages of one window; returns the bytes of the pages that the tiers have."""
        contents = {key: content for key in keys if (content := self.tier.fetch(key)) is not None}
        if not contents:
            return 0
        n = padded_count(len(contents))
        leaves = fill_leaves(self.transfers.abstract_leaves(window, n), list(contents.values()))
        if self._reserve_staging(n, page_fetch):
            leaves = self.transfers.copy_to_device(window, leaves)
        with self._lock:
            if not page_fetch.is_dropped:
                page_fetch.parts.append((list(contents), leaves))
        return len(contents) * self.transfers.page_bytes[window]

    def _reserve_staging(self, num_pages: int, page_fetch: PageFetch) -> bool:
        """Reserve room for `num_pages` pages on the device; returns False if there is none, or none is
        wanted."""
        with self._lock:
            fits = not page_fetch.is_dropped and self.staged_pages + num_pages <= MAX_STAGED_PAGES
            self.staged_pages += num_pages if fits else 0
            page_fetch.staged_pages += num_pages if fits else 0
            return fits

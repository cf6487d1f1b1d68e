"""KV offload: pages that the pools evict are stored in tiers, and fetched while their prompt waits in the
queue.

Swapping to the host's memory follows vLLM (Kwon et al., arXiv 2309.06180), a prefix cache in the host's
memory Mooncake (Qin et al., arXiv 2407.00079). A page that does not arrive is computed: tiers change when
tokens come, never which tokens.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import jax

from ....kvcache.pages import KVCache
from ....kvcache.tables import IN_TIER, PageTables, SequenceTables
from ...host.streams import warn_once
from ...runtime.compiled.transfers import MAX_COPY_PAGES
from .mover import PageFetch, PageMover
from .snapshot import read_cached_pages
from .tier import PageKey, TierChain, key_window, page_key

MAX_FETCH_ROUNDS = 3  # fetches for one admission, at most: pages may be evicted while others arrive
# Requests for each one that fetches although fetching is slower than computing: rates change.
TRIAL_INTERVAL = 16
# Time limit of a fetch: a multiple of the time of computing, and at least these seconds.
FETCH_PATIENCE = (4.0, 0.5)
PAGE_WAIT_SECONDS = 0.02  # seconds that an idle engine waits for pages
FLUSH_SECONDS = 60.0  # seconds that the end of an engine waits for files, at most
MAX_UNWRITTEN_BYTES = 1 << 26  # bytes that are queued for files at the end of an engine, at most

OptionalFetch = PageFetch | None


class PageFinder(Protocol):
    """Finder of the pages of prompts, in the pools and in tiers. The engine's thread calls it.

    A request in the queue has a `page_fetch`: the fetch of its pages, None if there is none. Methods that
    return nothing do nothing by default.
    """

    tables: PageTables

    def start_remote_prefill(
        self, prompt: Sequence[int], hashes: Sequence[bytes], address: str | None = None, salt: bytes = b""
    ) -> OptionalFetch:
        """Start the prefill of a queued prompt in another engine, if there is one.

        hashes: hashes of the prompt's full pages.
        address: address of the preferred engine, if there are several.
        salt: cache salt of the prompt.
        """
        ...

    def find_prefix(self, hashes: Sequence[bytes], page_fetch: OptionalFetch) -> SequenceTables:
        """Return the pages of the longest prefix that is in the pools, has been fetched, or can be fetched. A
        page that is not in the pools is IN_TIER."""
        ...

    def find_or_fetch_prefix(
        self, hashes: Sequence[bytes], page_fetch: OptionalFetch
    ) -> tuple[SequenceTables | None, OptionalFetch]:
        """Return the pages of the prompt at the head of the queue, and the fetch of its pages.

        All returned pages are in the pools or have arrived; None while the prompt waits. Starts to fetch
        pages that are in tiers.
        """
        ...

    def assign_pool_pages(
        self,
        prefix: SequenceTables,
        hashes: Sequence[bytes],
        pages: SequenceTables,
        page_fetch: OptionalFetch,
    ) -> None:
        """Assign pages of the pools to fetched pages: where `prefix` is IN_TIER, the page in `pages`."""

    def cancel_fetch(self, page_fetch: OptionalFetch) -> None:
        """Cancel a fetch."""

    def wait_for_pages(self) -> None:
        """Wait a moment for pages; called by an engine that has nothing else to do."""

    def move_pages(self, cache: KVCache, page_fetches: Iterable[OptionalFetch]) -> KVCache:
        """Copy evicted pages to the tiers before a step overwrites them, then copy fetched pages into the
        pools. Returns the cache."""
        ...

    def discard_evicted(self) -> None:
        """Discard the evictions since the last `move_pages`: these pages have been overwritten, and cannot be
        stored."""

    def on_weights_replaced(self, params: Any) -> None:
        """Find pages of these parameters only, from now on."""

    def on_wake(self, params: Any) -> None:
        """Open the tiers that were missing, if the parameters are on the device again after a sleep."""

    def close(self, cache: KVCache | None) -> None:
        """Store the pages of the prefix cache in persistent tiers, if there is a cache, and end the
        finder."""

    def report(self) -> dict[str, Any]:
        """Return numbers of pages by outcome, the seconds that decide whether pages are fetched, and each
        tier's report."""
        ...


class PoolPageFinder(PageFinder):
    """Page finder without tiers: it finds pages in the pools only."""

    def __init__(self, tables: PageTables):
        self.tables = tables

    def start_remote_prefill(
        self, prompt: Sequence[int], hashes: Sequence[bytes], address: str | None = None, salt: bytes = b""
    ) -> OptionalFetch:
        return None

    def find_prefix(self, hashes: Sequence[bytes], page_fetch: OptionalFetch) -> SequenceTables:
        return self.tables.find_prefix(hashes)

    def find_or_fetch_prefix(
        self, hashes: Sequence[bytes], page_fetch: OptionalFetch
    ) -> tuple[SequenceTables | None, OptionalFetch]:
        return self.tables.find_prefix(hashes), None

    def move_pages(self, cache: KVCache, page_fetches: Iterable[OptionalFetch]) -> KVCache:
        return cache

    def report(self) -> dict[str, Any]:
        return {}


class KVOffloader:
    """Page finder with tiers.

    `find_or_fetch_prefix` fetches the pages of the prompt at the head of the queue, which waits meanwhile.
    `assign_pool_pages` assigns pages of the pools to the fetched ones, and `move_pages` copies them there
    before the step's programs.

    Pages are stored and fetched only if fetching takes less time than computing, by the measured rates of
    both. Until both rates are known, pages are stored and fetched.

    token_seconds: returns the seconds of prefill of a token; None while unknown.
    kept, left_out, fetched, refused, late: numbers of pages stored, dropped, fetched, not requested, timed
        out.
    """

    def __init__(self, mover: PageMover, tables: PageTables, token_seconds: Callable[[], float | None]):
        self.tables, self.mover, self.token_seconds = tables, mover, token_seconds
        self.kept = self.left_out = self.fetched = self.refused = self.late = 0  # pages
        self._fetch_decisions = 0
        self._last_fetch: OptionalFetch = None
        for pool in tables.pools:
            pool.evicted = []

    # ------------------------------------------------------------ a prompt in the queue

    def start_remote_prefill(
        self, prompt: Sequence[int], hashes: Sequence[bytes], address: str | None = None, salt: bytes = b""
    ) -> OptionalFetch:
        remote_kv = self.mover.remote_kv
        if remote_kv is None or len(self.find_prefix(hashes, None)[0]) == len(hashes):
            return None
        prefill = remote_kv.request_prefill(prompt, len(hashes), address, salt)
        return None if prefill is None else PageFetch(prefill)

    def find_prefix(self, hashes: Sequence[bytes], page_fetch: OptionalFetch) -> SequenceTables:
        arrived_keys = set() if page_fetch is None else page_fetch.arrived_keys
        can_fetch = page_fetch is None or page_fetch.rounds < MAX_FETCH_ROUNDS

        def is_fetchable(g: int, page_hash: bytes) -> bool:
            key = page_key(page_hash, g)
            return key in arrived_keys or (can_fetch and self.mover.has(key))

        return self.tables.find_prefix(hashes, is_fetchable)

    def find_or_fetch_prefix(
        self, hashes: Sequence[bytes], page_fetch: OptionalFetch
    ) -> tuple[SequenceTables | None, OptionalFetch]:
        if page_fetch is not None and self._should_wait(page_fetch):
            self._last_fetch = page_fetch
            return None, page_fetch
        pages = self.find_prefix(hashes, page_fetch)
        arrived_keys = set() if page_fetch is None else page_fetch.arrived_keys
        lacking = [key for key in keys_in_tiers(pages, hashes) if key not in arrived_keys]
        if not lacking:
            return pages, page_fetch
        page_fetch = page_fetch or PageFetch()
        if page_fetch.is_pending:
            return None, page_fetch
        self._start_fetch(lacking, page_fetch)
        # waits, unless there is no fetch or all pages have arrived
        return self.find_or_fetch_prefix(hashes, page_fetch)

    def _should_wait(self, page_fetch: PageFetch) -> bool:
        """Return True if another engine may still compute the prompt in time."""
        remote_kv, prefill = self.mover.remote_kv, page_fetch.prefill
        return remote_kv is not None and prefill is not None and remote_kv.should_wait(prefill)

    def _start_fetch(self, keys: list[PageKey], page_fetch: PageFetch) -> None:
        """Start to fetch pages, unless the last fetch is late or computing is faster. Then no more pages are
        fetched for this request."""
        if page_fetch.is_late:
            self.late += page_fetch.num_pages
            page_fetch.rounds = MAX_FETCH_ROUNDS
        elif not self._should_fetch():
            self.refused += len(keys)
            page_fetch.rounds = MAX_FETCH_ROUNDS
        else:
            page_fetch.num_pages, self._last_fetch = len(keys), page_fetch
            self.mover.start_fetch(keys, page_fetch, self.patience_seconds(len(keys)))

    def assign_pool_pages(
        self,
        prefix: SequenceTables,
        hashes: Sequence[bytes],
        pages: SequenceTables,
        page_fetch: OptionalFetch,
    ) -> None:
        if page_fetch is not None:
            page_fetch.pool_pages = {
                page_key(hashes[i], g): pages[g][i]
                for g, group in enumerate(prefix)
                for i, page in enumerate(group)
                if page == IN_TIER
            }

    def cancel_fetch(self, page_fetch: OptionalFetch) -> None:
        if page_fetch is not None and not page_fetch.is_dropped:
            self.mover.release_fetch(page_fetch)

    def wait_for_pages(self) -> None:
        last_fetch = self._last_fetch
        if last_fetch is None or last_fetch.is_dropped:
            return
        if last_fetch.prefill is not None and not last_fetch.prefill.done.is_set():
            last_fetch.prefill.done.wait(PAGE_WAIT_SECONDS)
        elif last_fetch.is_pending and last_fetch.round_done is not None:
            last_fetch.round_done.wait(PAGE_WAIT_SECONDS)

    # ------------------------------------------------------------ on the device, in the engine's order

    def move_pages(self, cache: KVCache, page_fetches: Iterable[OptionalFetch]) -> KVCache:
        for g, pool in enumerate(self.tables.pools):
            evicted, pool.evicted = pool.evicted or [], []
            if evicted and self.mover.tier.is_writable and self.is_fetch_faster is not False:
                self.store_pages(cache, g, {page_key(page_hash, g): page for page, page_hash in evicted})
        for page_fetch in page_fetches:
            if page_fetch is not None:
                cache = self._place_fetched(cache, page_fetch)
        return cache

    def store_pages(self, cache: KVCache, window: int, pages: dict[PageKey, int]) -> None:
        """Offer pages of a window that no tier has, by key, as many as the mover has room for."""
        lacking = [key for key in pages if not self.mover.has(key)]
        for i in range(0, len(lacking), MAX_COPY_PAGES):
            keys = lacking[i : i + MAX_COPY_PAGES]
            try:
                self._offer_pages(cache, window, keys, [pages[key] for key in keys])
            except jax.errors.JaxRuntimeError:  # such as a device without memory for copies
                self.left_out += len(keys)

    def _offer_pages(
        self, cache: KVCache, window: int, keys: Sequence[PageKey], pages: Sequence[int]
    ) -> None:
        """Start to copy pages to the tiers; drop them if the mover has no room."""
        if self.mover.has_room(window, len(keys)):
            self.mover.offer(keys, self.mover.transfers.gather(cache, window, pages))
            self.kept += len(keys)
        else:
            self.left_out += len(keys)

    def discard_evicted(self) -> None:
        for pool in self.tables.pools:
            pool.evicted = []

    def on_weights_replaced(self, params: Any) -> None:
        self.mover.on_weights_replaced(params)

    def on_wake(self, params: Any) -> None:
        if not self.mover.tier.is_complete:
            self.mover.on_weights_replaced(params)

    def close(self, cache: KVCache | None) -> None:
        """Store the pages of the prefix cache in persistent tiers, within `FLUSH_SECONDS`: a disk that hangs
        must not keep the process."""
        self.mover.close()
        persistent_tiers = self.mover.tier.persistent_tiers
        deadline = time.monotonic() + FLUSH_SECONDS
        lost = 0
        if cache is not None and persistent_tiers.tiers:
            lost = self._store_cached_pages(cache, persistent_tiers, deadline)
        lost += persistent_tiers.flush(deadline)
        if lost and time.monotonic() > deadline:
            warn_once(
                f"{lost} pages were not written within {FLUSH_SECONDS:g} seconds: they are computed again"
            )

    def _store_cached_pages(self, cache: KVCache, tier_chain: TierChain, deadline: float) -> int:
        """Offer the pages of the prefix cache to tiers, until a time (monotonic clock). Returns the number of
        pages that were not offered."""
        cached_hashes = (
            (page_hash, g)
            for g, pool in enumerate(self.tables.pools)
            for page_hash, _ in pool.list_cached_pages()
        )
        num_left = sum(not tier_chain.has(page_key(page_hash, g)) for page_hash, g in cached_hashes)
        with suppress(jax.errors.JaxRuntimeError):  # raised if the device has failed
            for key, content in read_cached_pages(cache, self.tables, self.mover.transfers, tier_chain):
                tier_chain.flush(deadline, MAX_UNWRITTEN_BYTES)
                if time.monotonic() > deadline:
                    break
                tier_chain.offer(key, content)
                num_left -= 1
        return num_left

    def _place_fetched(self, cache: KVCache, page_fetch: PageFetch) -> KVCache:
        """Copy fetched pages into their pages of the pools; returns the cache."""
        for keys, leaves in page_fetch.parts:
            pages = [page_fetch.pool_pages.pop(key, None) for key in keys]
            if num_wanted := sum(page is not None for page in pages):
                cache = self.mover.transfers.scatter(cache, key_window(keys[0]), leaves, pages)
                self.fetched += num_wanted
        assert not page_fetch.pool_pages
        self.mover.release_fetch(page_fetch)
        return cache

    # ------------------------------------------------------------ fetch or compute

    @property
    def fetch_seconds(self) -> float | None:
        """Seconds to fetch one page of each window; None while the rate is unknown."""
        byte_seconds = self.mover.byte_seconds
        return None if byte_seconds is None else sum(self.mover.transfers.page_bytes) * byte_seconds

    @property
    def compute_seconds(self) -> float | None:
        """Seconds to compute the tokens of one page; None while the rate is unknown."""
        token_seconds = self.token_seconds()
        return None if token_seconds is None else token_seconds * self.tables.page_size

    @property
    def is_fetch_faster(self) -> bool | None:
        """True if a page is fetched in less time than it is computed; None while a rate is unknown."""
        fetch, compute = self.fetch_seconds, self.compute_seconds
        return None if fetch is None or compute is None else fetch < compute

    def _should_fetch(self) -> bool:
        """Return True if a request should fetch its pages; one of `TRIAL_INTERVAL` requests does even if it
        is slower."""
        self._fetch_decisions += 1
        if self.mover.remote_kv is not None:
            return True  # the prefill engine has computed it already
        return self.is_fetch_faster is not False or self._fetch_decisions % TRIAL_INTERVAL == 0

    def patience_seconds(self, pages: int) -> float:
        """Return the seconds that a request waits for `pages` pages, at most."""
        factor, min_seconds = FETCH_PATIENCE
        return max(min_seconds, factor * pages * (self.compute_seconds or min_seconds))

    def report(self) -> dict[str, Any]:
        rule = {"page_fetch_seconds": self.fetch_seconds, "page_compute_seconds": self.compute_seconds}
        pages = {n: getattr(self, n) for n in ("kept", "left_out", "fetched", "refused", "late")}
        return {"tiers": pages | rule | {"pays": self.is_fetch_faster} | self.mover.tier.report()}


def keys_in_tiers(pages_by_group: SequenceTables, hashes: Sequence[bytes]) -> list[PageKey]:
    """Return the keys of the pages that are IN_TIER, which means in tiers."""
    return [
        page_key(hashes[i], g)
        for g, pages in enumerate(pages_by_group)
        for i, page in enumerate(pages)
        if page == IN_TIER
    ]

"""Tiers of KV offload: they store pages outside of the device's pools, under the same hashes."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

PageKey = bytes  # a page's hash, then one byte: the number of its window
PageContent = bytes  # a page's keys and values in all layers of its window, concatenated


def page_key(page_hash: bytes, window: int) -> PageKey:
    """Return the key of a page, by its hash and the number of its window."""
    return page_hash + bytes([window])


def key_window(key: PageKey) -> int:
    """Return the number of a page's window."""
    return key[-1]


@dataclass
class Counts:
    """Counters of a tier.

    hits: number of pages that were fetched.
    damaged: number of pages whose content did not have the expected checksum or size.
    kept: number of pages that were stored.
    fetched_bytes: bytes of the pages that were fetched.
    fetched_seconds: seconds that all fetches took, of absent pages too.
    """

    hits: int = 0
    damaged: int = 0
    kept: int = 0
    fetched_bytes: int = 0
    fetched_seconds: float = 0.0

    def report(self) -> dict[str, Any]:
        return asdict(self)

    @contextmanager
    def time_fetch(self) -> Iterator[None]:
        """Add the time of the block to `fetched_seconds`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.fetched_seconds += time.perf_counter() - begin

    def record_hit(self, content: PageContent) -> None:
        """Count a fetched page."""
        self.hits += 1
        self.fetched_bytes += len(content)


class Tier(Protocol):
    """Pages by key, in bounded room with LRU eviction.

    The engine's thread calls `has` at every step, so `has` reads memory only; the other methods may block. No
    method raises: a page that cannot be stored, or cannot be read as it was written, is absent. By default a
    tier belongs to this process alone, stores at once, and needs no `flush`.

    name: unique in a chain; reports are listed under it.
    is_persistent: True if the pages outlive the process.
    """

    name: str
    is_persistent: bool

    @property
    def is_writable(self) -> bool:
        """True if the tier stores offered pages."""
        ...

    def has(self, key: PageKey) -> bool:
        """Return True if the page is stored."""
        ...

    def offer(self, key: PageKey, content: PageContent) -> None:
        """Store a page, if there is room for it."""
        ...

    def fetch(self, key: PageKey) -> PageContent | None:
        """Return the content of a page as it was offered, or None."""
        ...

    def refresh(self) -> None:
        """Add the pages that other processes have stored."""

    def flush(self, deadline: float, max_bytes: int = 0) -> int:
        """Wait until at most `max_bytes` bytes of offered pages are not stored yet, or until the time
        `deadline` of the monotonic clock. Returns the number of pages that are not stored yet."""
        return 0

    def volatile_pages(self) -> list[tuple[PageKey, PageContent]]:
        """Return key and content of the pages that are lost when this process ends."""
        return []

    def report(self) -> dict[str, Any]:
        """Return the tier's size and its counters, as plain numbers."""
        ...


class TierChain:
    """Tiers, the fastest first. A page is offered to all of them, and found in any.

    is_complete: False if tiers are missing, because they need the parameters and these were not on the
        device.
    """

    def __init__(self, tiers: Sequence[Tier], is_complete: bool = True):
        self.tiers, self.is_complete = list(tiers), is_complete

    @property
    def is_writable(self) -> bool:
        return any(tier.is_writable for tier in self.tiers)

    def has(self, key: PageKey) -> bool:
        return any(tier.has(key) for tier in self.tiers)

    def offer(self, key: PageKey, content: PageContent) -> None:
        for tier in self.tiers:
            tier.offer(key, content)

    def fetch(self, key: PageKey) -> PageContent | None:
        for number, tier in enumerate(self.tiers):
            if tier.has(key) and (content := tier.fetch(key)) is not None:
                for faster in self.tiers[:number]:
                    faster.offer(key, content)
                return content
        return None

    def refresh(self) -> None:
        for tier in self.tiers:
            tier.refresh()

    def flush(self, deadline: float, max_bytes: int = 0) -> int:
        return sum(tier.flush(deadline, max_bytes) for tier in self.tiers)

    def volatile_pages(self) -> list[tuple[PageKey, PageContent]]:
        return [entry for tier in self.tiers for entry in tier.volatile_pages()]

    @property
    def persistent_tiers(self) -> "TierChain":
        """Chain of the tiers that store pages and outlive the process."""
        return TierChain([tier for tier in self.tiers if tier.is_persistent and tier.is_writable])

    def report(self) -> dict[str, Any]:
        return {tier.name: tier.report() for tier in self.tiers}

"""Tiers of KV offload: they keep pages outside of the device's pools, found by the same names."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

Key = bytes  # a page's name, then one byte: the number of its window
Content = bytes  # a page's keys and values in all layers of its window, concatenated


def key_of(name: bytes, window: int) -> Key:
    return name + bytes([window])


def window_of(key: Key) -> int:
    return key[-1]


@dataclass
class Counts:
    """Counters of a tier.

    hits: pages that were fetched.
    damaged: pages whose content did not have the expected checksum or size.
    kept: pages that were stored.
    """

    hits: int = 0
    damaged: int = 0
    kept: int = 0
    fetched_bytes: int = 0
    fetched_seconds: float = 0.0

    def report(self) -> dict[str, Any]:
        return asdict(self)

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Add the time of the block to `fetched_seconds`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.fetched_seconds += time.perf_counter() - begin

    def hit(self, content: Content) -> None:
        self.hits += 1
        self.fetched_bytes += len(content)


class Tier(Protocol):
    """Pages by key, in bounded room with LRU eviction.

    The engine's thread calls `has` at every step, so it reads memory only; the other methods may block. None
    raises: a page that cannot be stored, or not be read as it was written, is not here. By default a tier is
    this process's alone, stores at once and loses nothing.
    """

    name: str
    lasts: bool  # its pages outlive the process

    @property
    def keeps(self) -> bool:
        """True where it stores pages that are offered."""
        ...

    def has(self, key: Key) -> bool: ...

    def offer(self, key: Key, content: Content) -> None:
        """Store a page, if there is room for it."""
        ...

    def fetch(self, key: Key) -> Content | None:
        """Return a page as it was offered, or None."""
        ...

    def refresh(self) -> None:
        """Look for pages that other processes have stored."""

    def settle(self, until: float, most: int = 0) -> int:
        """Wait until at most `most` bytes of offered pages are not stored yet, or until a time of the
        monotonic clock; returns the number of those pages."""
        return 0

    def own(self) -> list[tuple[Key, Content]]:
        """Return the pages that are lost when this process ends."""
        return []

    def report(self) -> dict[str, Any]:
        """Return its size and its counters, as plain numbers."""
        ...


class TierChain:
    """Tiers, the fastest first: pages are offered to all of them and found in any. A chain that is not
    `whole` lacks the tiers that need the parameters, which were not on the device."""

    def __init__(self, tiers: Sequence[Tier], whole: bool = True):
        self.tiers, self.whole = list(tiers), whole

    @property
    def keeps(self) -> bool:
        return any(tier.keeps for tier in self.tiers)

    def has(self, key: Key) -> bool:
        return any(tier.has(key) for tier in self.tiers)

    def offer(self, key: Key, content: Content) -> None:
        for tier in self.tiers:
            tier.offer(key, content)

    def fetch(self, key: Key) -> Content | None:
        for number, tier in enumerate(self.tiers):
            if tier.has(key) and (content := tier.fetch(key)) is not None:
                for quicker in self.tiers[:number]:
                    quicker.offer(key, content)
                return content
        return None

    def refresh(self) -> None:
        for tier in self.tiers:
            tier.refresh()

    def settle(self, until: float, most: int = 0) -> int:
        return sum(tier.settle(until, most) for tier in self.tiers)

    def own(self) -> list[tuple[Key, Content]]:
        return [entry for tier in self.tiers for entry in tier.own()]

    @property
    def lasting(self) -> "TierChain":
        """Chain of the tiers that store pages and outlive the process."""
        return TierChain([tier for tier in self.tiers if tier.lasts and tier.keeps])

    def report(self) -> dict[str, Any]:
        return {tier.name: tier.report() for tier in self.tiers}

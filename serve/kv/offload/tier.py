"""A tier keeps pages beside the device's pools, found by their names: one more place for a prefix."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

Key = bytes  # a page's name, and behind it the number of its window
Content = bytes  # a page's keys and values in all layers of its window, one after the other


def key_of(name: bytes, window: int) -> Key:
    return name + bytes([window])


def window_of(key: Key) -> int:
    return key[-1]


@dataclass
class Counts:
    """What a tier did: pages that were fetched, that were wanted and not as they should be, and that were
    kept; bytes and seconds of those fetched."""

    hits: int = 0
    damaged: int = 0
    kept: int = 0
    fetched_bytes: int = 0
    fetched_seconds: float = 0.0

    def report(self) -> dict[str, Any]:
        return asdict(self)

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Time spent inside is spent on a fetch."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.fetched_seconds += time.perf_counter() - begin

    def hit(self, content: Content) -> None:
        self.hits += 1
        self.fetched_bytes += len(content)


class Tier(Protocol):
    """Pages by key, in bounded room: those that were used least recently go first.

    `has` is asked by the engine's thread at every step and reads memory only; the others may take their time.
    None of them raises: what cannot be kept, or read as it was written, is not here.
    """

    name: str
    lasts: bool  # whether its pages outlive the process

    @property
    def keeps(self) -> bool:
        """Whether it takes pages at all."""
        ...

    def has(self, key: Key) -> bool: ...

    def offer(self, key: Key, content: Content) -> None:
        """Keep a page, if there is room for it."""
        ...

    def fetch(self, key: Key) -> Content | None:
        """A page as it was offered, or None."""
        ...

    def refresh(self) -> None:
        """Look for pages that others have kept."""
        ...

    def settle(self, until: float, most: int = 0) -> int:
        """Wait until all that was offered is where it stays, but for `most` bytes, or until a time of the
        monotonic clock; gives the pages that are still on their way."""
        ...

    def own(self) -> list[tuple[Key, Content]]:
        """The pages that end with this process."""
        ...

    def report(self) -> dict[str, Any]:
        """What is there and what it did, as plain numbers."""
        ...


class TierChain:
    """Tiers of which the first are the quickest: pages are offered to all of them, and found in any. One that
    is not `whole` lacks those that parameters have to be there for."""

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
        """Those of its tiers that take pages and outlive the process."""
        return TierChain([tier for tier in self.tiers if tier.lasts and tier.keeps])

    def report(self) -> dict[str, Any]:
        return {tier.name: tier.report() for tier in self.tiers}

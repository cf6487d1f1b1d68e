"""Prefix indexes of the router: which pages a replica has cached."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol


class PrefixIndex(Protocol):
    """Index of a replica's cached pages, by the hashes that the router computes."""

    def count_cached(self, hashes: Sequence[bytes]) -> int:
        """Return the number of a prompt's first pages that are cached, up to the first missing one."""
        ...

    def has(self, page_hash: bytes) -> bool:
        """Return True if a page is cached."""
        ...

    def on_prompt_sent(self, hashes: Sequence[bytes]) -> None:
        """Record that a prompt with these pages was sent to the replica."""
        ...

    def on_request_ended(self, hashes: Sequence[bytes]) -> None:
        """Record that the request of a prompt with these pages has ended."""
        ...

    def clear(self) -> None:
        """Forget all pages: the replica has restarted."""
        ...


class AssumedPrefixIndex:
    """Index that assumes the last `max_pages` pages sent to a replica to be cached (LRU). A prompt's last
    pages are evicted first, as the replica does."""

    def __init__(self, max_pages: int):
        self._max_pages = max_pages
        self._hashes: OrderedDict[bytes, None] = OrderedDict()

    def count_cached(self, hashes: Sequence[bytes]) -> int:
        if not hashes or hashes[0] not in self._hashes:  # true of nearly all replicas of a large fleet
            return 0
        return sum(1 for _ in takewhile(self._hashes.__contains__, hashes))

    def has(self, page_hash: bytes) -> bool:
        return page_hash in self._hashes

    def on_prompt_sent(self, hashes: Sequence[bytes]) -> None:
        for page_hash in reversed(hashes):
            self._hashes[page_hash] = None
            self._hashes.move_to_end(page_hash)
        while len(self._hashes) > self._max_pages:
            self._hashes.popitem(last=False)

    def on_request_ended(self, hashes: Sequence[bytes]) -> None:
        """Do nothing: the pages were computed, and stay cached."""

    def clear(self) -> None:
        self._hashes.clear()


class EventPrefixIndex:
    """Index of the pages that a replica's KV cache events report, and of the pages of running requests."""

    def __init__(self):
        self._hashes: set[bytes] = set()
        self._pending = Counter[bytes]()

    def count_cached(self, hashes: Sequence[bytes]) -> int:
        return sum(1 for _ in takewhile(self.has, hashes))

    def has(self, page_hash: bytes) -> bool:
        return page_hash in self._hashes or page_hash in self._pending

    def on_prompt_sent(self, hashes: Sequence[bytes]) -> None:
        self._pending.update(hashes)

    def on_request_ended(self, hashes: Sequence[bytes]) -> None:
        for page_hash in hashes:
            self._pending[page_hash] -= 1
            if not self._pending[page_hash]:
                del self._pending[page_hash]

    def on_page_stored(self, page_hash: bytes) -> None:
        self._hashes.add(page_hash)

    def on_page_removed(self, page_hash: bytes) -> None:
        self._hashes.discard(page_hash)

    def clear(self) -> None:
        self._hashes.clear()

"""Prefix indexes of the router: which pages a replica has cached."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol


class PrefixIndex(Protocol):
    """Pages of a replica, by the names that the router computes."""

    def hits(self, names: Sequence[bytes]) -> int:
        """Return the number of a prompt's first pages that are cached."""
        ...

    def has(self, name: bytes) -> bool:
        """Return whether a page is cached."""
        ...

    def sent(self, names: Sequence[bytes]) -> None:
        """Note that a prompt with these pages is sent to the replica."""
        ...

    def ended(self, names: Sequence[bytes]) -> None:
        """Note that the request is done."""
        ...

    def forget(self) -> None:
        """Forget all pages: the replica has restarted."""
        ...


class AssumedPrefixIndex:
    """Assumes that the last `most` pages sent to a replica are cached (LRU). A prompt's last pages are
    evicted first, as in the replica's own cache."""

    def __init__(self, most: int):
        self._most = most
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def hits(self, names: Sequence[bytes]) -> int:
        if not names or names[0] not in self._names:  # nearly all replicas of a large fleet
            return 0
        return sum(1 for _ in takewhile(self._names.__contains__, names))

    def has(self, name: bytes) -> bool:
        return name in self._names

    def sent(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._most:
            self._names.popitem(last=False)

    def ended(self, names: Sequence[bytes]) -> None:
        """Keep the pages: they were computed."""

    def forget(self) -> None:
        self._names.clear()


class EventPrefixIndex:
    """Pages that a replica's KV cache events report, and those of prompts that are under way."""

    def __init__(self):
        self._names: set[bytes] = set()
        self._coming = Counter[bytes]()

    def hits(self, names: Sequence[bytes]) -> int:
        return sum(1 for _ in takewhile(self.has, names))

    def has(self, name: bytes) -> bool:
        return name in self._names or name in self._coming

    def sent(self, names: Sequence[bytes]) -> None:
        self._coming.update(names)

    def ended(self, names: Sequence[bytes]) -> None:
        for name in names:
            self._coming[name] -= 1
            if not self._coming[name]:
                del self._coming[name]

    def stored(self, name: bytes) -> None:
        self._names.add(name)

    def removed(self, name: bytes) -> None:
        self._names.discard(name)

    def forget(self) -> None:
        self._names.clear()

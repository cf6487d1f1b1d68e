"""What is known of the pages that a replica has."""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol


class PrefixIndex(Protocol):
    """Pages of a replica by the names that the router gives them."""

    def hits(self, names: Sequence[bytes]) -> int:
        """How many of a prompt's first pages are there."""
        ...

    def sent(self, names: Sequence[bytes]) -> None:
        """A prompt with these pages goes to the replica."""
        ...

    def ended(self, names: Sequence[bytes]) -> None:
        """It is done."""
        ...

    def forget(self) -> None:
        """The replica begins anew."""
        ...


class AssumedPrefixIndex:
    """What was sent to a replica is thought to be there, the latest `most` pages of it: of a prompt the last
    go first, as in the replica's own cache."""

    def __init__(self, most: int):
        self._most = most
        self._names: OrderedDict[bytes, None] = OrderedDict()

    def hits(self, names: Sequence[bytes]) -> int:
        return sum(1 for _ in takewhile(self._names.__contains__, names))

    def sent(self, names: Sequence[bytes]) -> None:
        for name in reversed(names):
            self._names[name] = None
            self._names.move_to_end(name)
        while len(self._names) > self._most:
            self._names.popitem(last=False)

    def ended(self, names: Sequence[bytes]) -> None:
        """What was computed stays."""

    def forget(self) -> None:
        self._names.clear()


class EventPrefixIndex:
    """What a replica says is there, and what is on its way to be."""

    def __init__(self):
        self._names: set[bytes] = set()
        self._coming = Counter[bytes]()

    def hits(self, names: Sequence[bytes]) -> int:
        return sum(1 for _ in takewhile(lambda name: name in self._names or name in self._coming, names))

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

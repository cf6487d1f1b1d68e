"""Places of LoRA adapters on the device, as bookkeeping on the host."""

from collections import Counter, OrderedDict

from ....checkpoints.adapters.adapter import Adapter
from ....model.weights.adapted import NO_ADAPTER


class Places:
    """Places beside the weights, one for each adapter. An unused adapter stays until its place is needed; the
    least recently used one is evicted."""

    def __init__(self, count: int):
        self._free = list(range(count))
        self._held: OrderedDict[bytes, int] = OrderedDict()  # by digest, the least recently used first
        self._users: Counter[bytes] = Counter()
        self._due: dict[int, Adapter] = {}
        self.count, self.loads = count, 0

    def fits(self, adapter: Adapter | None) -> bool:
        """Return True if an adapter is on the device, or can be loaded there now."""
        return adapter is None or adapter.digest in self._held or bool(self._free) or self._idle() is not None

    def take(self, adapter: Adapter | None) -> int:
        """Reserve the place of an adapter that fits until `release`; it may still have to be written."""
        if adapter is None:
            return NO_ADAPTER
        if adapter.digest not in self._held:
            self._held[adapter.digest] = place = self._free.pop(0) if self._free else self._evicted()
            self._due[place] = adapter
        self._held.move_to_end(adapter.digest)
        self._users[adapter.digest] += 1
        return self._held[adapter.digest]

    def release(self, adapter: Adapter | None) -> None:
        if adapter is not None:
            self._users[adapter.digest] -= 1
            assert self._users[adapter.digest] >= 0, "an adapter is released more often than taken"

    def due(self) -> dict[int, Adapter]:
        """Return the adapters to write into places before the next step, and count them as written."""
        due, self._due = self._due, {}
        self.loads += len(due)
        return due

    def forget(self) -> None:
        """Forget all adapters, which are no longer on the device. None may be in use."""
        assert not +self._users, "adapters are in use"
        self._free, self._due = list(range(self.count)), {}
        self._held.clear()

    def _idle(self) -> bytes | None:
        return next((name for name in self._held if not self._users[name]), None)

    def _evicted(self) -> int:
        idle = self._idle()
        assert idle is not None, "no place is free"
        del self._users[idle]
        place = self._held.pop(idle)
        self._due.pop(place, None)
        return place

"""LoRA slots of the device, as bookkeeping on the host: which adapter each holds, and who uses it."""

from collections import Counter, OrderedDict

from ....checkpoints.adapters.adapter import Adapter
from ....model.weights.lora import NO_ADAPTER


class LoRASlots:
    """LoRA slots of the device. Each holds one adapter.

    An adapter without requests stays until its slot is needed. The least recently used one is evicted first.

    count: slots.
    loads: adapters written into slots so far.
    """

    def __init__(self, count: int):
        self._free = list(range(count))
        self._slot_by_digest = OrderedDict[bytes, int]()  # the least recently used first
        self._users: Counter[bytes] = Counter()
        self._due: dict[int, Adapter] = {}
        self.count, self.loads = count, 0

    def fits(self, adapter: Adapter | None) -> bool:
        """Return True if an adapter is on the device, or if a slot for it is free or may be evicted."""
        return (
            adapter is None
            or adapter.digest in self._slot_by_digest
            or bool(self._free)
            or self._unused_digest() is not None
        )

    def reserve(self, adapter: Adapter | None) -> int:
        """Reserve the slot of an adapter until `release`, and return it. Call `fits` before, `pop_due`
        after."""
        if adapter is None:
            return NO_ADAPTER
        if adapter.digest not in self._slot_by_digest:
            self._slot_by_digest[adapter.digest] = slot = (
                self._free.pop(0) if self._free else self._evict_unused()
            )
            self._due[slot] = adapter
        self._slot_by_digest.move_to_end(adapter.digest)
        self._users[adapter.digest] += 1
        return self._slot_by_digest[adapter.digest]

    def release(self, adapter: Adapter | None) -> None:
        if adapter is not None:
            self._users[adapter.digest] -= 1
            assert self._users[adapter.digest] >= 0, "an adapter is released more often than taken"

    def pop_due(self) -> dict[int, Adapter]:
        """Return the adapters to write before the next step, by slot, and count them as written."""
        due, self._due = self._due, {}
        self.loads += len(due)
        return due

    def clear(self) -> None:
        """Empty all slots: the device has lost the adapters. None may be in use."""
        assert not +self._users, "adapters are in use"
        self._free, self._due = list(range(self.count)), {}
        self._slot_by_digest.clear()

    def _unused_digest(self) -> bytes | None:
        return next((digest for digest in self._slot_by_digest if not self._users[digest]), None)

    def _evict_unused(self) -> int:
        digest = self._unused_digest()
        assert digest is not None, "no place is free"
        del self._users[digest]
        slot = self._slot_by_digest.pop(digest)
        self._due.pop(slot, None)
        return slot

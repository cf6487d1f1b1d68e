"""Tiers of pages that prefill engines compute for this engine: of one prefill engine, and of several."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..offload.remote_kv import RemoteKV, RemotePrefill
from ..offload.tier import Counts, PageContent, PageKey, TierChain, key_window
from .service import PrefillService

MAX_KNOWN_KEYS = 1 << 16  # announced pages that are remembered, at most


class RemoteKVTier(RemoteKV):
    """Tier of the pages that one prefill engine has announced.

    Back-pressure: a prompt is sent only if the pages of all outstanding prompts fit in the prefill engine's
    memory. Other prompts are queued here. The request at the head of the scheduler's queue waits at most
    `patience_seconds`. After a timeout no request waits and no prompt is sent until the prefill engine
    answers again: prompts are computed here.

    clock: returns seconds.
    asked, answered, late: numbers of prompts sent, computed, and timed out.
    nbytes: bytes of the pages of outstanding prompts.
    """

    def __init__(
        self, service: PrefillService, patience_seconds: float, clock: Callable[[], float] = time.monotonic
    ):
        self.service = service
        self.patience_seconds = patience_seconds
        self.counts = Counts()
        self._now = clock
        self.page_bytes: Sequence[int] = ()
        self.asked = self.answered = self.late = self.nbytes = 0
        self._is_silent = False
        self._queue: deque[RemotePrefill] = deque()  # prompts that are still to be sent
        self._announced_keys: OrderedDict[PageKey, None] = OrderedDict()
        self._lock = threading.RLock()  # the service may answer within `begin_prefill`

    # ------------------------------------------------------------ prompts

    def request_prefill(
        self, prompt: Sequence[int], num_pages: int, address: str | None = None, salt: bytes = b""
    ) -> RemotePrefill | None:
        """Queue a prompt for the prefill engine. Returns None while the engine is silent or not connected.
        `address` is ignored: there is one engine."""
        with self._lock:
            if self._is_silent or not self.service.is_connected:
                return None
            prefill = RemotePrefill(list(prompt), num_pages, salt)
            self._queue.append(prefill)
            self._send_prefills()
            return prefill

    def should_wait(self, prefill: RemotePrefill) -> bool:
        with self._lock:
            if prefill.done.is_set() or self._is_silent or prefill.is_released:
                return False
            if prefill.number is None:  # it has overtaken others in the scheduler's queue
                self._queue.remove(prefill)
                self._begin_prefill(prefill)
            now = self._now()
            prefill.deadline = now + self.patience_seconds if prefill.deadline is None else prefill.deadline
            if now < prefill.deadline or prefill.done.is_set():
                return not prefill.done.is_set()
            self._is_silent = True
            self.late += 1
            return False

    def release_prefill(self, prefill: RemotePrefill) -> None:
        with self._lock:
            if prefill.is_released:
                return
            prefill.is_released = True
            if prefill.number is None:
                self._queue.remove(prefill)
            else:
                self.nbytes -= self._prefill_bytes(prefill)
                is_late = prefill.deadline is not None and self._now() > prefill.deadline
                # a late prompt is not cancelled: its answer shows that the engine is alive
                if not prefill.done.is_set() and not is_late:
                    self.service.cancel_prefill(prefill.number)
            self._send_prefills()

    def _send_prefills(self) -> None:
        """Send queued prompts while their pages fit in the prefill engine's memory."""
        while self._queue and (
            not self.nbytes or self.nbytes + self._prefill_bytes(self._queue[0]) <= self.service.room_bytes
        ):
            self._begin_prefill(self._queue.popleft())

    def _begin_prefill(self, prefill: RemotePrefill) -> None:
        self.nbytes += self._prefill_bytes(prefill)
        self.asked += 1
        prefill.number = self.service.begin_prefill(
            prefill.prompt, partial(self._on_ready, prefill), prefill.salt
        )

    def _prefill_bytes(self, prefill: RemotePrefill) -> int:
        """Return the bytes of a prompt's pages in all windows."""
        return prefill.num_pages * sum(self.page_bytes)

    def _on_ready(self, prefill: RemotePrefill, keys: Sequence[PageKey]) -> None:
        """Remember the keys of a prompt's pages, and set `done`; no keys if the prompt has failed."""
        with self._lock:
            self._is_silent = False
            self.answered += bool(keys)
            for key in keys:
                self._announced_keys[key] = None
                self._announced_keys.move_to_end(key)
            while len(self._announced_keys) > MAX_KNOWN_KEYS:
                self._announced_keys.popitem(last=False)
            prefill.done.set()

    # ------------------------------------------------------------ pages

    def has(self, key: PageKey) -> bool:
        return key in self._announced_keys

    def fetch(self, key: PageKey) -> PageContent | None:
        with self.counts.time_fetch():
            content = self.service.fetch(key)
        if content is not None and len(content) != self._key_bytes(key):
            self.counts.damaged += 1
            content = None
        if content is None:
            with self._lock:
                self._announced_keys.pop(key, None)
        else:
            self.counts.record_hit(content)
        return content

    def _key_bytes(self, key: PageKey) -> int:
        """Return the bytes of a page; 0 if its window is unknown."""
        window = key_window(key)
        return self.page_bytes[window] if window < len(self.page_bytes) else 0

    def expect_realm(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        with self._lock:
            self._announced_keys.clear()
            self.page_bytes = page_bytes
        self.service.expect_realm(realm, page_bytes)

    def report(self) -> dict[str, Any]:
        counts = {
            "is_here": self.service.is_connected,
            "asked": self.asked,
            "answered": self.answered,
            "late": self.late,
        }
        with self._lock:
            known = {
                "pages": len(self._announced_keys),
                "bytes": sum(map(self._key_bytes, self._announced_keys)),
            }
        return counts | known | self.counts.report()


class RemoteKVPool(RemoteKV):
    """Tiers of several prefill engines, by address.

    A prompt goes to the engine that its request names. If that engine is not connected or not listed, it goes
    to the engine with the fewest outstanding bytes: a request cannot reach any other address.
    """

    def __init__(self, tiers: Mapping[str, RemoteKVTier]):
        self.tiers = dict(tiers)
        self._chain = TierChain(list(self.tiers.values()))

    # ------------------------------------------------------------ prompts

    def request_prefill(
        self, prompt: Sequence[int], num_pages: int, address: str | None = None, salt: bytes = b""
    ) -> RemotePrefill | None:
        for candidate in self._addresses(address):
            if (prefill := self.tiers[candidate].request_prefill(prompt, num_pages, salt=salt)) is not None:
                prefill.address = candidate
                return prefill
        return None

    def _addresses(self, preferred: str | None) -> Iterator[str]:
        """Yield the addresses in the order in which a prompt tries them, `preferred` first."""
        if preferred in self.tiers:
            yield preferred
        yield from sorted(self.tiers.keys() - {preferred}, key=lambda address: self.tiers[address].nbytes)

    def should_wait(self, prefill: RemotePrefill) -> bool:
        return self.tiers[prefill.address].should_wait(prefill)

    def release_prefill(self, prefill: RemotePrefill) -> None:
        self.tiers[prefill.address].release_prefill(prefill)

    # ------------------------------------------------------------ pages

    def has(self, key: PageKey) -> bool:
        return self._chain.has(key)

    def fetch(self, key: PageKey) -> PageContent | None:
        return self._chain.fetch(key)

    def expect_realm(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        for tier in self.tiers.values():
            tier.expect_realm(realm, page_bytes)

    def report(self) -> dict[str, Any]:
        """Return the sums over all engines, and each engine's report under "at" and its address."""
        reports = {address: tier.report() for address, tier in self.tiers.items()}
        names = next(iter(reports.values()))
        return {name: sum(report[name] for report in reports.values()) for name in names} | {"at": reports}

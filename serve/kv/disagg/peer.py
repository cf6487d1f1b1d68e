"""Tiers of pages that prefill engines compute for this engine: of one, and of several."""

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ..offload.peer import RemoteKV, RemotePrefill
from ..offload.tier import Content, Counts, Key, TierChain, window_of
from .service import PrefillService

MOST_KEYS = 1 << 16  # pages that are known to be there, at most


class RemoteKVTier(RemoteKV):
    """Pages of one prefill engine: those that it has announced.

    Back-pressure: prompts are sent only while the pages of all outstanding ones fit in the prefill engine's
    memory; the others are queued here. The request at the head of the scheduler's queue waits at most
    `patience` seconds. After a timeout no request waits and no prompt is sent until the prefill engine
    answers again: prompts are computed here. `clock` returns seconds.
    """

    def __init__(self, source: PrefillService, patience: float, clock: Callable[[], float] = time.monotonic):
        self.source, self.patience, self.counts, self._now = source, patience, Counts(), clock
        self.page_bytes: Sequence[int] = ()
        self.asked = self.answered = self.late = self.nbytes = 0
        self._is_silent = False
        self._line: deque[RemotePrefill] = deque()  # prompts that are still to be sent
        self._known: OrderedDict[Key, None] = OrderedDict()
        self._lock = threading.RLock()  # the service may answer within `begin`

    # ------------------------------------------------------------ prompts

    def ask(self, prompt: Sequence[int], pages: int, at: str | None = None) -> RemotePrefill | None:
        """`at` is not looked at: there is one prefill engine."""
        with self._lock:
            if self._is_silent or not self.source.is_here:
                return None
            ask = RemotePrefill(list(prompt), pages)
            self._line.append(ask)
            self._send()
            return ask

    def awaits(self, ask: RemotePrefill) -> bool:
        with self._lock:
            if ask.done.is_set() or self._is_silent or ask.released:
                return False
            if ask.number is None:  # it has overtaken others in the scheduler's queue
                self._line.remove(ask)
                self._begin(ask)
            now = self._now()
            ask.until = now + self.patience if ask.until is None else ask.until
            if now < ask.until or ask.done.is_set():
                return not ask.done.is_set()
            self._is_silent = True
            self.late += 1
            return False

    def release(self, ask: RemotePrefill) -> None:
        with self._lock:
            if ask.released:
                return
            ask.released = True
            if ask.number is None:
                self._line.remove(ask)
            else:
                self.nbytes -= self._size(ask)
                is_late = ask.until is not None and self._now() > ask.until
                if (
                    not ask.done.is_set() and not is_late
                ):  # of a late one the answer says that the source lives
                    self.source.leave(ask.number)
            self._send()

    def _send(self) -> None:
        while self._line and (not self.nbytes or self.nbytes + self._size(self._line[0]) <= self.source.room):
            self._begin(self._line.popleft())

    def _begin(self, ask: RemotePrefill) -> None:
        self.nbytes += self._size(ask)
        self.asked += 1
        ask.number = self.source.begin(ask.prompt, partial(self._ready, ask))

    def _size(self, ask: RemotePrefill) -> int:
        return ask.pages * sum(self.page_bytes)

    def _ready(self, ask: RemotePrefill, keys: Sequence[Key]) -> None:
        with self._lock:
            self._is_silent = False
            self.answered += bool(keys)
            for key in keys:
                self._known[key] = None
                self._known.move_to_end(key)
            while len(self._known) > MOST_KEYS:
                self._known.popitem(last=False)
            ask.done.set()

    # ------------------------------------------------------------ pages

    def has(self, key: Key) -> bool:
        return key in self._known

    def fetch(self, key: Key) -> Content | None:
        with self.counts.fetching():
            content = self.source.fetch(key)
        if content is not None and len(content) != self._bytes_of(key):
            self.counts.damaged += 1
            content = None
        if content is None:
            with self._lock:
                self._known.pop(key, None)
        else:
            self.counts.hit(content)
        return content

    def _bytes_of(self, key: Key) -> int:
        window = window_of(key)
        return self.page_bytes[window] if window < len(self.page_bytes) else 0

    def renew(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        with self._lock:
            self._known.clear()
            self.page_bytes = page_bytes
        self.source.renew(realm, page_bytes)

    def report(self) -> dict[str, Any]:
        own = {
            "is_here": self.source.is_here,
            "asked": self.asked,
            "answered": self.answered,
            "late": self.late,
        }
        with self._lock:
            there = {"pages": len(self._known), "bytes": sum(map(self._bytes_of, self._known))}
        return own | there | self.counts.report()


class RemoteKVPool(RemoteKV):
    """The tiers of several prefill engines, by address.

    A prompt goes to the engine that its request names. Where that one is not reached or not among these, it
    goes to the engine with the fewest outstanding bytes: a request cannot reach any other address.
    """

    def __init__(self, tiers: Mapping[str, RemoteKVTier]):
        self.tiers = dict(tiers)
        self._chain = TierChain(list(self.tiers.values()))

    # ------------------------------------------------------------ prompts

    def ask(self, prompt: Sequence[int], pages: int, at: str | None = None) -> RemotePrefill | None:
        for place in self._places(at):
            if (ask := self.tiers[place].ask(prompt, pages)) is not None:
                ask.at = place
                return ask
        return None

    def _places(self, at: str | None) -> Iterator[str]:
        if at in self.tiers:
            yield at
        yield from sorted(self.tiers.keys() - {at}, key=lambda place: self.tiers[place].nbytes)

    def awaits(self, ask: RemotePrefill) -> bool:
        return self.tiers[ask.at].awaits(ask)

    def release(self, ask: RemotePrefill) -> None:
        self.tiers[ask.at].release(ask)

    # ------------------------------------------------------------ pages

    def has(self, key: Key) -> bool:
        return self._chain.has(key)

    def fetch(self, key: Key) -> Content | None:
        return self._chain.fetch(key)

    def renew(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        for tier in self.tiers.values():
            tier.renew(realm, page_bytes)

    def report(self) -> dict[str, Any]:
        """Return the sums over all engines, and each engine's own report under `at` and its address."""
        at = {place: tier.report() for place, tier in self.tiers.items()}
        names = next(iter(at.values()))
        return {name: sum(one[name] for one in at.values()) for name in names} | {"at": at}

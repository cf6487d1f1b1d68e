"""Write-behind tier: a thread of its own writes to a slow tier, so that no other thread waits for a disk."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ...host.streams import warn
from .tier import Content, Key, Tier

MOST = 1 << 28  # bytes that wait to be written, at most
LINGER = 1.0  # seconds without work after which the thread ends


def in_thread(work: Callable[[], None], name: str) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()


class WriteBehindTier:
    """Queue before another tier. Pages are found in the queue until they are written. Beyond `most_bytes` new
    pages are dropped, since a page that is in no tier can be computed again.

    start: runs the writer, which ends after `linger` seconds without work; called with its name too.
    """

    def __init__(
        self,
        tier: Tier,
        most_bytes: int = MOST,
        start: Callable[[Callable[[], None], str], None] = in_thread,
        linger: float = LINGER,
    ):
        self.tier, self.most_bytes, self._start, self._linger = tier, most_bytes, start, linger
        self.name, self.lasts = tier.name, tier.lasts
        self.nbytes = self.left_out = 0
        self._waiting: OrderedDict[Key, Content] = OrderedDict()
        self._changed = threading.Condition()
        self._working = False

    @property
    def keeps(self) -> bool:
        return self.tier.keeps

    def has(self, key: Key) -> bool:
        return key in self._waiting or self.tier.has(key)

    def offer(self, key: Key, content: Content) -> None:
        with self._changed:
            if self.has(key):
                return
            if self.nbytes and self.nbytes + len(content) > self.most_bytes:
                self.left_out += 1
                return
            self._waiting[key] = content
            self.nbytes += len(content)
            self._changed.notify_all()
            if not self._working:
                self._start(self._pass_on, f"duetto-{self.name}")
                self._working = True  # not before: a thread that failed to start must not be waited for

    def fetch(self, key: Key) -> Content | None:
        content = self._waiting.get(key)
        return self.tier.fetch(key) if content is None else content

    def refresh(self) -> None:
        self.tier.refresh()

    def settle(self, until: float, most: int = 0) -> int:
        with self._changed:
            self._changed.wait_for(
                lambda: not self._working or self.nbytes <= most, max(0.0, until - time.monotonic())
            )
            return len(self._waiting)

    def own(self) -> list[tuple[Key, Content]]:
        return self.tier.own()

    def report(self) -> dict[str, Any]:
        return self.tier.report() | {"waiting": len(self._waiting), "left_out": self.left_out}

    def _pass_on(self) -> None:
        """Write queued pages until none comes; a page leaves the queue once it is written."""
        while (entry := self._next()) is not None:
            key, content = entry
            try:
                self.tier.offer(key, content)
            except Exception as error:  # noqa: BLE001 - a page that is not kept is computed again
                warn(f"pages are not kept: {type(error).__name__}: {error}")
            with self._changed:
                del self._waiting[key]
                self.nbytes -= len(content)
                self._changed.notify_all()

    def _next(self) -> tuple[Key, Content] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting, self._linger)
            if self._waiting:
                return next(iter(self._waiting.items()))
            self._working = False
            self._changed.notify_all()
            return None

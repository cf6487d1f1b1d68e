"""Write-behind tier: a thread writes to a slow tier, so that no other thread waits for a disk."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from ...host.streams import warn_once
from .tier import PageContent, PageKey, Tier

MAX_QUEUED_BYTES = 1 << 28  # bytes that wait to be written, at most
WRITER_LINGER_SECONDS = 1.0  # seconds without work after which the thread ends


def start_daemon(target: Callable[[], None], name: str) -> None:
    """Start a daemon thread that runs `target`."""
    threading.Thread(target=target, name=name, daemon=True).start()


class WriteBehindTier:
    """Queue of pages in front of another tier. Pages are found in the queue until they are written.

    If more than `max_bytes` bytes are queued, new pages are dropped: a page that is in no tier can be
    computed again.

    start: starts a thread, from a function and a name. The thread ends after `linger_seconds` seconds without
        work.
    nbytes: bytes of the queued pages.
    left_out: number of pages that were dropped.
    """

    def __init__(
        self,
        tier: Tier,
        max_bytes: int = MAX_QUEUED_BYTES,
        start: Callable[[Callable[[], None], str], None] = start_daemon,
        linger_seconds: float = WRITER_LINGER_SECONDS,
    ):
        self.tier, self.max_bytes, self._start, self._linger_seconds = tier, max_bytes, start, linger_seconds
        self.name, self.is_persistent = tier.name, tier.is_persistent
        self.nbytes = self.left_out = 0
        self._queued: OrderedDict[PageKey, PageContent] = OrderedDict()
        self._changed = threading.Condition()
        self._is_writing = False

    @property
    def is_writable(self) -> bool:
        return self.tier.is_writable

    def has(self, key: PageKey) -> bool:
        return key in self._queued or self.tier.has(key)

    def offer(self, key: PageKey, content: PageContent) -> None:
        with self._changed:
            if self.has(key):
                return
            if self.nbytes and self.nbytes + len(content) > self.max_bytes:
                self.left_out += 1
                return
            self._queued[key] = content
            self.nbytes += len(content)
            self._changed.notify_all()
            if not self._is_writing:
                self._start(self._write_queued_pages, f"duetto-{self.name}-writer")
                self._is_writing = True  # after the start: nothing may wait for a thread that never ran

    def fetch(self, key: PageKey) -> PageContent | None:
        content = self._queued.get(key)
        return self.tier.fetch(key) if content is None else content

    def refresh(self) -> None:
        self.tier.refresh()

    def flush(self, deadline: float, max_bytes: int = 0) -> int:
        with self._changed:
            self._changed.wait_for(
                lambda: not self._is_writing or self.nbytes <= max_bytes,
                max(0.0, deadline - time.monotonic()),
            )
            return len(self._queued)

    def volatile_pages(self) -> list[tuple[PageKey, PageContent]]:
        return self.tier.volatile_pages()

    def report(self) -> dict[str, Any]:
        return self.tier.report() | {"waiting": len(self._queued), "left_out": self.left_out}

    def _write_queued_pages(self) -> None:
        """Write queued pages until none arrives for `linger_seconds` seconds. A page stays queued until it is
        written."""
        while (entry := self._next_page()) is not None:
            key, content = entry
            try:
                self.tier.offer(key, content)
            except Exception as error:  # noqa: BLE001 - a page that is not stored is computed again
                warn_once(f"pages are not kept: {type(error).__name__}: {error}")
            with self._changed:
                del self._queued[key]
                self.nbytes -= len(content)
                self._changed.notify_all()

    def _next_page(self) -> tuple[PageKey, PageContent] | None:
        """Return the oldest queued page; None after `linger_seconds` seconds without one."""
        with self._changed:
            self._changed.wait_for(lambda: self._queued, self._linger_seconds)
            if self._queued:
                return next(iter(self._queued.items()))
            self._is_writing = False
            self._changed.notify_all()
            return None

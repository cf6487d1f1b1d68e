"""Tier of pages in the host's memory."""

import threading
from collections import OrderedDict
from typing import Any

from .tier import Counts, PageContent, PageKey, Tier


class HostTier(Tier):
    """Tier of at most `max_bytes` bytes of pages in the host's memory, allocated page by page (LRU).

    nbytes: bytes of the pages that are stored.
    """

    name, is_persistent = "host", False

    def __init__(self, max_bytes: int):
        self.max_bytes, self.nbytes, self.counts = max_bytes, 0, Counts()
        self._pages: OrderedDict[PageKey, PageContent] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def is_writable(self) -> bool:
        return self.max_bytes > 0

    def has(self, key: PageKey) -> bool:
        return key in self._pages

    def offer(self, key: PageKey, content: PageContent) -> None:
        if len(content) > self.max_bytes:
            return
        with self._lock:
            self.nbytes += len(content) - len(self._pages.pop(key, b""))
            self._pages[key] = content
            self.counts.kept += 1
            while self.nbytes > self.max_bytes:
                _, evicted = self._pages.popitem(last=False)
                self.nbytes -= len(evicted)

    def fetch(self, key: PageKey) -> PageContent | None:
        with self._lock, self.counts.time_fetch():
            content = self._pages.get(key)
            if content is not None:
                self._pages.move_to_end(key)
                self.counts.record_hit(content)
            return content

    def volatile_pages(self) -> list[tuple[PageKey, PageContent]]:
        with self._lock:
            return list(self._pages.items())

    def report(self) -> dict[str, Any]:
        return {"pages": len(self._pages), "bytes": self.nbytes} | self.counts.report()

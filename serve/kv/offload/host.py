"""Tier of pages in the host's memory."""

import threading
from collections import OrderedDict
from typing import Any

from .tier import Content, Counts, Key, Tier


class HostTier(Tier):
    """Pages in at most `most_bytes` of memory, which is allocated page by page (LRU)."""

    name, lasts = "host", False

    def __init__(self, most_bytes: int):
        self.most_bytes, self.nbytes, self.counts = most_bytes, 0, Counts()
        self._kept: OrderedDict[Key, Content] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def keeps(self) -> bool:
        return self.most_bytes > 0

    def has(self, key: Key) -> bool:
        return key in self._kept

    def offer(self, key: Key, content: Content) -> None:
        if len(content) > self.most_bytes:
            return
        with self._lock:
            self.nbytes += len(content) - len(self._kept.pop(key, b""))
            self._kept[key] = content
            self.counts.kept += 1
            while self.nbytes > self.most_bytes:
                _, gone = self._kept.popitem(last=False)
                self.nbytes -= len(gone)

    def fetch(self, key: Key) -> Content | None:
        with self._lock, self.counts.fetching():
            content = self._kept.get(key)
            if content is not None:
                self._kept.move_to_end(key)
                self.counts.hit(content)
            return content

    def own(self) -> list[tuple[Key, Content]]:
        with self._lock:
            return list(self._kept.items())

    def report(self) -> dict[str, Any]:
        return {"pages": len(self._kept), "bytes": self.nbytes} | self.counts.report()

"""Page pool: a free list, reference counts, and the hashes by which written pages are found again."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class PageListener(Protocol):
    """Receiver of changes to the prefix cache."""

    def stored(self, parent: bytes | None, name: bytes, tokens: Sequence[int]) -> None:
        """A page of these tokens can be found; it is behind its parent, or the first."""
        ...

    def removed(self, name: bytes) -> None: ...

    def cleared(self) -> None: ...


class PagePool:
    """Host bookkeeping of the pages of a KVCache.

    A freed page keeps its name until it is issued again, so prefix reuse is a lookup and eviction is issuing.
    Pages without a name are issued first, then named ones in order of release; a sequence's last pages are
    released before its first.
    """

    def __init__(self, pages: int):
        self.pages = pages
        self.references = [0] * pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(pages))
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        # pages evicted from the prefix cache with their hashes, if they are recorded
        self.evicted: list[tuple[int, bytes]] | None = None
        self.listener: PageListener | None = None

    @property
    def free(self) -> int:
        """Number of pages without an owner, whether they can still be found or not."""
        return len(self._free)

    def issue(self, count: int) -> list[int]:
        """Take `count` free pages; the caller has looked at `free`."""
        assert count <= self.free, f"{count} pages wanted, {self.free} free"
        return [self._issue_one() for _ in range(count)]

    def _issue_one(self) -> int:
        page, _ = self._free.popitem(last=False)
        name = self._name_of.pop(page, None)
        if name is not None:
            del self._page_of[name]
            if self.evicted is not None:
                self.evicted.append((page, name))
            if self.listener is not None:
                self.listener.removed(name)
        self.references[page] = 1
        return page

    def release(self, pages: Sequence[int]) -> None:
        """Release a sequence's pages, given in the order of the sequence."""
        for page in reversed(pages):
            assert self.references[page] > 0, f"page {page} is released twice"
            self.references[page] -= 1
            if self.references[page] == 0:
                self._free[page] = None
                if page not in self._name_of:
                    self._free.move_to_end(page, last=False)

    def name(self, page: int, name: bytes) -> bool:
        """Let a full page be found under `name`, and say whether it is; the first page of a name keeps it."""
        if name in self._page_of or page in self._name_of:
            return False
        self._page_of[name] = page
        self._name_of[page] = name
        return True

    def named(self) -> list[tuple[bytes, int]]:
        """All names with their pages."""
        return list(self._page_of.items())

    def find(self, name: bytes) -> int | None:
        """The page of a name, if it is here; nothing is taken yet."""
        return self._page_of.get(name)

    def idle(self, pages: Iterable[int]) -> int:
        """Number of these pages that are in the free list, and would leave it when shared."""
        return sum(self.references[page] == 0 for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """Take one more reference on each page that was found."""
        for page in pages:
            if self.references[page] == 0:
                del self._free[page]
            self.references[page] += 1

    def forget(self) -> None:
        """Drop every name: the pages' contents are gone or belong to other weights."""
        self._page_of.clear()
        self._name_of.clear()
        if self.listener is not None:
            self.listener.cleared()

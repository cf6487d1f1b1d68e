"""Page pool on the host: a free list, reference counts, and the hashes by which written pages are found
again."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class PageListener(Protocol):
    """Receiver of changes to the prefix cache."""

    def on_stored(
        self, parent_hash: bytes | None, page_hash: bytes, tokens: Sequence[int], salt: bytes = b""
    ) -> None:
        """Handle a page that can now be found by its hash. `tokens` are the page's tokens. `parent_hash` is
        the hash of the page before it, None for a first page. `salt` is the cache salt that its hash begins
        from."""
        ...

    def on_removed(self, page_hash: bytes) -> None:
        """Handle a page that can no longer be found."""
        ...

    def on_cleared(self) -> None:
        """Handle the removal of all pages from the prefix cache."""
        ...


class PagePool:
    """Free list, reference counts and hashes of a KVCache's pages, on the host.

    A freed page keeps its hash until it is issued again. So prefix reuse is a lookup, and issuing a page
    evicts its old content. Pages without a hash are issued first, then hashed pages in order of release
    (LRU). A sequence's last pages are released before its first.

    num_pages: number of pages
    references: owners of each page
    evicted: pages whose hash was dropped when they were issued, with that hash; None if not recorded
    listener: receiver of changes
    """

    def __init__(self, num_pages: int):
        self.num_pages = num_pages
        self.references = [0] * num_pages
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_pages))
        self._page_by_hash: dict[bytes, int] = {}
        self._hash_by_page: dict[int, bytes] = {}
        # evicted pages with their hashes, if they are recorded
        self.evicted: list[tuple[int, bytes]] | None = None
        self.listener: PageListener | None = None

    @property
    def num_free(self) -> int:
        """Number of pages without an owner, whether they can still be found or not."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take `count` free pages, each with one reference. The caller must check `num_free` first."""
        assert count <= self.num_free, f"{count} pages wanted, {self.num_free} free"
        return [self._allocate_page() for _ in range(count)]

    def _allocate_page(self) -> int:
        """Take one free page, evict its old content, and return its number."""
        page, _ = self._free.popitem(last=False)
        page_hash = self.drop_hash(page)
        if page_hash is not None and self.evicted is not None:
            self.evicted.append((page, page_hash))
        self.references[page] = 1
        return page

    def drop_hash(self, page: int) -> bytes | None:
        """Drop the hash of a page, and return that hash; None if the page has none."""
        page_hash = self._hash_by_page.pop(page, None)
        if page_hash is not None:
            del self._page_by_hash[page_hash]
            if self.listener is not None:
                self.listener.on_removed(page_hash)
        return page_hash

    def release(self, pages: Sequence[int]) -> None:
        """Drop one reference of each page of a sequence; `pages` are in the order of the sequence."""
        for page in reversed(pages):
            assert self.references[page] > 0, f"page {page} is released twice"
            self.references[page] -= 1
            if self.references[page] == 0:
                self._free[page] = None
                if page not in self._hash_by_page:
                    self._free.move_to_end(page, last=False)

    def cache_page(self, page: int, page_hash: bytes) -> bool:
        """Let a full page be found by its hash. Returns False if the page has a hash, or another page has
        this one."""
        if page_hash in self._page_by_hash or page in self._hash_by_page:
            return False
        self._page_by_hash[page_hash] = page
        self._hash_by_page[page] = page_hash
        return True

    def list_cached_pages(self) -> list[tuple[bytes, int]]:
        """Return the hash and the number of every page that can be found."""
        return list(self._page_by_hash.items())

    def find(self, page_hash: bytes) -> int | None:
        """Return the page with this hash, or None. Takes no reference."""
        return self._page_by_hash.get(page_hash)

    def count_free(self, pages: Iterable[int]) -> int:
        """Count the given pages that are free; sharing takes them from the free list."""
        return sum(self.references[page] == 0 for page in pages)

    def share(self, pages: Iterable[int]) -> None:
        """Take one more reference to each of the pages."""
        for page in pages:
            if self.references[page] == 0:
                del self._free[page]
            self.references[page] += 1

    def reset_prefix_cache(self) -> None:
        """Drop every hash: the pages' contents are lost, or were computed with other weights."""
        self._page_by_hash.clear()
        self._hash_by_page.clear()
        if self.listener is not None:
            self.listener.on_cleared()

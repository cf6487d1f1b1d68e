"""Page tables of sequences, one per group of layers. A group has the layers of one window, which keep the
same positions.

Layers without a window keep all positions. In the other groups a sequence owns only the pages that its next
tokens see; earlier pages return to their pool (as in vLLM's hybrid cache). That many pages are reserved at
admission, so the pool never runs out. Recurrent layers are one more group. A page of this group is the state
after its last token, so a token sees the page of the token before it. A prefill writes only some of these
pages.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import cast

from ..model.recurrent.kinds import STATE_BLOCK_TOKENS, STATE_WINDOW
from .pool import PageListener, PagePool

NULL_PAGE = -1  # entry of a page table: before the window and released, or a state that was not written
IN_TIER = -2  # entry of a cached prefix: the page is not in a pool, but in a tier
TierLookup = Callable[[int, bytes], bool]  # True if a tier has the page of a hash, for a group
SequenceTables = list[list[int]]  # pages of one sequence in order, for each group
MAX_PROMPT_CHECKPOINTS = 2  # checkpoints of a prompt's state, in addition to those at every stride
KEYLESS_STRIDE_PAGES = 16  # pages of a stride if no layer keeps all keys


def max_window_pages(window: int, step_tokens: int, page_size: int) -> int:
    """Return the most pages that a sequence owns in a windowed group while a step computes `step_tokens` of
    its tokens."""
    return -(-(window - 1 + step_tokens) // page_size) + 1


def max_state_pages(step_tokens: int, decode_tokens: int, page_size: int, stride: int) -> int:
    """Return the most state pages that a sequence owns while a prefill step computes `step_tokens` tokens, or
    a decode step `decode_tokens`. These are the states before and after those tokens, and the checkpoints
    between."""
    return 2 + max(
        MAX_PROMPT_CHECKPOINTS + step_tokens // (stride * page_size), -(-decode_tokens // page_size)
    )


def state_stride(state_bytes: int, key_bytes: int, page_size: int) -> int:
    """Return the stride of state checkpoints, in pages. A state of `state_bytes` bytes then takes at most as
    much as the keys of a stride, with `key_bytes` bytes a page. The stride is a multiple of
    `STATE_BLOCK_TOKENS` tokens, as prefills begin at these. Without keys it is `KEYLESS_STRIDE_PAGES`
    pages."""
    if not state_bytes:
        return 1
    min_pages = max(1, STATE_BLOCK_TOKENS // page_size)
    wanted = -(-state_bytes // key_bytes) if key_bytes else KEYLESS_STRIDE_PAGES
    return -(-wanted // min_pages) * min_pages


class PageTables:
    """Page tables of sequences on the host: a page pool for each window, and the pages reserved in windowed
    pools.

    windows: window of each group, in tokens; None is unlimited
    page_size: tokens of a page
    stride: pages between state checkpoints
    pools: page pool of each group
    max_pages: most pages of a sequence in each group; None if not bounded
    max_released_pages: most pages that leave a window in one step
    reserved_pages: pages of each group reserved for admitted sequences
    full_attention_pool: pool of the group without a window, or None
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        pages: Sequence[int],
        page_size: int,
        step_tokens: int,
        decode_tokens: int = 1,
        stride: int = 1,
    ):
        assert len(windows) == len(pages) and None not in windows[1:], (windows, pages)
        self.windows, self.page_size, self.stride = windows, page_size, stride
        self.pools = [PagePool(n) for n in pages]
        states = max_state_pages(step_tokens, decode_tokens, page_size, stride)
        self.max_pages = [
            None
            if w is None
            else states
            if w == STATE_WINDOW
            else max_window_pages(w, step_tokens, page_size)
            for w in windows
        ]
        self.max_released_pages = -(-step_tokens // page_size) + 1
        self.reserved_pages = [0] * len(pages)
        self.full_attention_pool = self.pools[0] if windows[0] is None else None

    @property
    def shards(self) -> "Sequence[PageTables]":
        """Page tables of each data-parallel shard; without shards, these alone."""
        return [self]

    @property
    def occupancy(self) -> float:
        """Share of the pages that sequences own, in the group where it is highest."""
        return max(1 - pool.num_free / pool.num_pages for pool in self.pools)

    def find_prefix(self, hashes: Sequence[bytes], tier_lookup: TierLookup | None = None) -> SequenceTables:
        """Return the pages of the longest prefix that is cached, or in a tier by `tier_lookup`. In a windowed
        group, only pages that the next token sees are needed. Takes no reference."""
        group_pages: list[list[int | None]] = []
        count = len(hashes)
        for g, window in enumerate(self.windows):
            pages = (self._find_page(g, page_hash, tier_lookup) for page_hash in hashes[:count])
            group_pages.append(list(pages if window else takewhile(lambda page: page is not None, pages)))
            count = len(group_pages[-1])  # a page missing in the unlimited window ends every prefix
        while (
            gap := min(self._first_missing_page(g, pages, count) for g, pages in enumerate(group_pages))
        ) < count:
            count = gap
        first_visible = [self._first_visible_page(g, count * self.page_size) for g in range(len(group_pages))]
        return [
            [NULL_PAGE] * first_visible[g] + cast(list[int], pages[first_visible[g] : count])
            for g, pages in enumerate(group_pages)
        ]

    def rank_shard_prefixes(
        self, hashes: Sequence[bytes], running: Sequence[int], max_running: int
    ) -> Sequence[SequenceTables]:
        """Return the cached prefix in each shard with less than `max_running` running sequences, the best
        shard first. `running` is the number of sequences in each shard."""
        return [self.find_prefix(hashes)] if running[0] < max_running else []

    def _find_page(self, g: int, page_hash: bytes, tier_lookup: TierLookup | None) -> int | None:
        """Return the page of a hash in group g, IN_TIER if a tier has it, or None."""
        page = self.pools[g].find(page_hash)
        return IN_TIER if page is None and tier_lookup is not None and tier_lookup(g, page_hash) else page

    def _first_missing_page(self, g: int, pages: list[int | None], count: int) -> int:
        """Return the first page that a token after `count` pages sees and that is missing; `count` if none
        is."""
        visible = range(self._first_visible_page(g, count * self.page_size), count)
        return next((i for i in visible if pages[i] is None), count)

    def _first_visible_page(self, g: int, start: int) -> int:
        """Return the first page that a token at position `start` sees."""
        window = self.windows[g]
        if window is None:
            return 0
        return max(0, start - (1 if window == STATE_WINDOW else window - 1)) // self.page_size

    def fits(self, prefix: SequenceTables, tokens: int, max_tokens: int, spare_pages: int) -> bool:
        """True if a sequence of `tokens` tokens, which grows to at most `max_tokens`, can be admitted and
        leaves `spare_pages` pages free."""
        has_room = all(
            reserved + self._pages_to_reserve(g, max_tokens) <= pool.num_pages
            for g, (pool, reserved) in enumerate(zip(self.pools, self.reserved_pages, strict=True))
        )
        if self.full_attention_pool is None or not has_room:
            return has_room
        cached = [page for page in prefix[0] if page != IN_TIER]
        new = self._num_pages(tokens) - len(cached)
        needed = new + self.full_attention_pool.count_free(cached) + spare_pages
        return needed <= self.full_attention_pool.num_free

    def admit(self, prefix: SequenceTables, tokens: int, max_tokens: int) -> SequenceTables:
        """Return the page tables of a new sequence. Shares the cached pages of its prefix, and issues a page
        for each IN_TIER entry. Grows the group without a window to `tokens` tokens. Call `fits` first."""
        for g, (pool, pages) in enumerate(zip(self.pools, prefix, strict=True)):
            pool.share(page for page in pages if page >= 0)
            self.reserved_pages[g] += self._pages_to_reserve(g, max_tokens)
        tables = [
            [pool.allocate(1)[0] if page == IN_TIER else page for page in pages]
            for pool, pages in zip(self.pools, prefix, strict=True)
        ]
        grown = self.grow(tables, tokens)
        assert grown
        return tables

    def grow(self, tables: SequenceTables, tokens: int) -> bool:
        """Issue pages for a sequence's first `tokens` tokens in the group without a window. Returns False if
        too few are free."""
        if self.full_attention_pool is None:
            return True
        need = self._num_pages(tokens) - len(tables[0])
        if need > self.full_attention_pool.num_free:
            return False
        if need > 0:
            tables[0] += self.full_attention_pool.allocate(need)
        return True

    def advance_windows(
        self, tables: SequenceTables, start: int, end: int, state_checkpoints: Collection[int] | None = None
    ) -> None:
        """Prepare windowed groups before tokens [start, end) are computed: issue pages for them, and release
        pages that no token sees any more. A prefill passes `state_checkpoints` and keeps a state every
        `stride` pages, after the pages in `state_checkpoints`, and at its end. Without `state_checkpoints`,
        as in decode, every page keeps its state."""
        for g, (window, pages) in enumerate(zip(self.windows, tables, strict=True)):
            if window is None:
                continue
            first = min(self._first_visible_page(g, start), len(pages))
            self._release_before(g, pages, first)
            sparse = window == STATE_WINDOW and state_checkpoints is not None
            for i in range(len(pages), self._num_pages(end)):
                is_kept = (
                    not sparse
                    or self._is_checkpoint(i, state_checkpoints or ())
                    or (i + 1) * self.page_size >= end
                )
                pages.append(self.pools[g].allocate(1)[0] if is_kept else NULL_PAGE)

    def _release_before(self, g: int, pages: list[int], first: int) -> None:
        """Release a sequence's pages before `first`, the first page that it still sees."""
        low = max(0, first - self.max_released_pages)
        released = [page for page in pages[low:first] if page != NULL_PAGE]
        if released:
            self.pools[g].release(released)
            pages[low:first] = [NULL_PAGE] * (first - low)

    def _is_checkpoint(self, i: int, state_checkpoints: Collection[int]) -> bool:
        """True if the state after page i is kept for the prefix cache."""
        return (i + 1) % self.stride == 0 or i in state_checkpoints

    def state_checkpoints(self, hashes: Sequence[bytes], prefix: SequenceTables) -> tuple[int, ...]:
        """Return the pages after which to checkpoint a prompt's recurrent state: its last full page, and the
        end of its cached prefix. Other prompts are likely to branch there. `hashes` are the hashes of its
        full pages."""
        if STATE_WINDOW not in self.windows or not hashes:
            return ()
        min_pages = max(1, STATE_BLOCK_TOKENS // self.page_size)
        cached = takewhile(
            lambda page_hash: (
                self.full_attention_pool and self.full_attention_pool.find(page_hash) is not None
            ),
            hashes,
        )
        ends = {n - n % min_pages for n in (len(hashes), sum(1 for _ in cached))}
        return tuple(end - 1 for end in sorted(ends) if end > len(prefix[0]))

    def set_listener(self, listener: PageListener) -> None:
        """Report changes of the first group's prefix cache to a listener."""
        self.pools[0].listener = listener

    def cache_pages(
        self,
        tables: SequenceTables,
        hashes: Sequence[bytes],
        first: int,
        tokens: Sequence[int],
        state_checkpoints: Collection[int] = (),
        salt: bytes = b"",
    ) -> None:
        """Let a sequence's full pages be found by their hashes, from page number `first` on. Of state pages,
        only checkpoints can be found. `salt` is the cache salt that the hashes begin from."""
        for window, pool, pages in zip(self.windows, self.pools, tables, strict=True):
            for i in range(first, len(hashes)):
                if pages[i] != NULL_PAGE and (
                    window != STATE_WINDOW or self._is_checkpoint(i, state_checkpoints)
                ):
                    is_new = pool.cache_page(pages[i], hashes[i])
                    if is_new and pool.listener is not None:
                        page = tokens[i * self.page_size : (i + 1) * self.page_size]
                        pool.listener.on_stored(hashes[i - 1] if i else None, hashes[i], page, salt)

    def drop_hashes(self, tables: SequenceTables) -> None:
        """Drop the hashes of all pages of a sequence. The sequence keeps its pages."""
        for pool, pages in zip(self.pools, tables, strict=True):
            for page in pages:
                pool.drop_hash(page)

    def release(self, tables: SequenceTables, max_tokens: int) -> None:
        """Release all pages of a sequence, and its reservations."""
        for g, (pool, pages) in enumerate(zip(self.pools, tables, strict=True)):
            pool.release([page for page in pages if page != NULL_PAGE])
            self.reserved_pages[g] -= self._pages_to_reserve(g, max_tokens)

    def has_free_pages(self, count: int) -> bool:
        """True if `count` pages of every group have no owner."""
        return all(pool.num_free >= count for pool in self.pools)

    @contextmanager
    def borrow_pages(self, count: int) -> Iterator[SequenceTables]:
        """Issue `count` free pages of every group for the time of the block, which overwrites them."""
        borrowed = [pool.allocate(count) for pool in self.pools]
        try:
            yield borrowed
        finally:
            for pool, pages in zip(self.pools, borrowed, strict=True):
                pool.release(pages)

    def reset_prefix_cache(self) -> None:
        """Drop every hash: the pages' contents are lost, or were computed with other weights."""
        for pool in self.pools:
            pool.reset_prefix_cache()

    def _pages_to_reserve(self, g: int, max_tokens: int) -> int:
        """Return the pages to reserve in group g for a sequence of at most `max_tokens` tokens."""
        max_pages = self.max_pages[g]
        return 0 if max_pages is None else min(max_pages, self._num_pages(max_tokens))

    def _num_pages(self, tokens: int) -> int:
        """Return the number of pages for `tokens` tokens."""
        return -(-tokens // self.page_size)

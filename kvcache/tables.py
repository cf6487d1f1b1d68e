"""The pages of sequences in every group of layers: those of one window keep the same positions, and share a
page table.

Layers without a window keep all positions. Of the others a sequence owns only the pages that its next tokens
see, and those behind return to their pool (as in vLLM's hybrid cache). As many are reserved when it is
admitted, so they never run out. Recurrent layers are one more group: a page of theirs is the state behind its
last token, so a token sees the page of the one before it, and of the pages that a prefill passes only some
are written.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import takewhile
from typing import cast

from ..model.recurrent.kinds import BLOCK, STATE
from .pool import PageListener, PagePool

GONE = -1  # in a page table: behind the window, and no longer owned, or never written
AWAY = -2  # in what was found: not in a pool, but in a tier
Away = Callable[[int, bytes], bool]  # whether a tier has a window's page of a name
Tables = list[list[int]]  # of one sequence: its pages in order, for each group
MARKS = 2  # states that a sequence keeps of its prompt, beside those of every stride
KEYLESS = 16  # pages of a stride where no layer keeps all keys


def window_pages(window: int, work: int, page_size: int) -> int:
    """Most pages that a sequence owns of a windowed group while `work` tokens are computed at once."""
    return -(-(window - 1 + work) // page_size) + 1


def state_pages(work: int, in_turn: int, page_size: int, stride: int) -> int:
    """Most pages of states that a sequence owns while `work` tokens are computed at once, or `in_turn` one by
    one: that before them and their last, and those between that are kept."""
    return 2 + max(MARKS + work // (stride * page_size), -(-in_turn // page_size))


def state_stride(state: int, keys: int, page_size: int) -> int:
    """Behind how many pages a state of `state` bytes is kept: as many as its bytes are keys, of which a page
    has `keys`, if there are some. Prefills begin at multiples of BLOCK tokens, and so must they."""
    if not state:
        return 1
    least = max(1, BLOCK // page_size)
    wanted = -(-state // keys) if keys else KEYLESS
    return -(-wanted // least) * least


class PageTables:
    """Host bookkeeping of a KVCache: a pool for each window, and what is reserved of the windowed ones.

    `work` is the most tokens of a sequence that one step computes, `in_turn` the most that it computes one by
    one. States are kept behind every `stride` pages.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        pages: Sequence[int],
        page_size: int,
        work: int,
        in_turn: int = 1,
        stride: int = 1,
    ):
        assert len(windows) == len(pages) and None not in windows[1:], (windows, pages)
        self.windows, self.page_size, self.stride = windows, page_size, stride
        self.pools = [PagePool(n) for n in pages]
        states = state_pages(work, in_turn, page_size, stride)
        self.most = [
            None if w is None else states if w == STATE else window_pages(w, work, page_size) for w in windows
        ]
        self.passed = -(-work // page_size) + 1  # pages that a step leaves behind at most
        self.reserved = [0] * len(pages)
        self.lent = self.claimed = 0  # pages of each group for what is no sequence
        self.full = self.pools[0] if windows[0] is None else None

    @property
    def shards(self) -> "Sequence[PageTables]":
        """The tables of each data-parallel shard; without shards these alone."""
        return [self]

    @property
    def occupancy(self) -> float:
        """Share of the pages that sequences own, in the group where it is highest."""
        return max(1 - (pool.free + self.lent) / pool.pages for pool in self.pools)

    def find(self, names: Sequence[bytes], away: Away | None = None) -> Tables:
        """Pages of the longest prefix that is here or `away`: all of it, or what its window sees. Nothing is
        taken yet."""
        here: list[list[int | None]] = []
        count = len(names)
        for g, window in enumerate(self.windows):
            places = (self._place(g, name, away) for name in names[:count])
            here.append(list(places if window else takewhile(lambda place: place is not None, places)))
            count = len(here[-1])  # what an unlimited window lacks ends every prefix
        while (gap := min(self._gap(g, found, count) for g, found in enumerate(here))) < count:
            count = gap
        seen = [self._first(g, count * self.page_size) for g in range(len(here))]
        return [[GONE] * seen[g] + cast(list[int], found[seen[g] : count]) for g, found in enumerate(here)]

    def in_order(self, names: Sequence[bytes], running: Sequence[int], most: int) -> Sequence[Tables]:
        """Pages of the longest prefix in each shard with less than `most` sequences, the best shard first;
        `running`: sequences of each shard."""
        return [self.find(names)] if running[0] < most else []

    def _place(self, g: int, name: bytes, away: Away | None) -> int | None:
        page = self.pools[g].find(name)
        return AWAY if page is None and away is not None and away(g, name) else page

    def _gap(self, g: int, found: list[int | None], count: int) -> int:
        """The first page that a token behind `count` pages sees and that is not here; `count` if all are."""
        seen = range(self._first(g, count * self.page_size), count)
        return next((i for i in seen if found[i] is None), count)

    def _first(self, g: int, start: int) -> int:
        """The first page that a token at position `start` sees."""
        window = self.windows[g]
        if window is None:
            return 0
        return max(0, start - (1 if window == STATE else window - 1)) // self.page_size

    def fits(self, found: Tables, tokens: int, end: int, spare: int) -> bool:
        """True if a sequence of `tokens` tokens, `end` at most, can be admitted and leave `spare` pages."""
        room = all(
            self.claimed + reserved + self._charge(g, end) <= pool.pages
            for g, (pool, reserved) in enumerate(zip(self.pools, self.reserved, strict=True))
        )
        if self.full is None or not room:
            return room
        here = [page for page in found[0] if page != AWAY]
        new = self._pages_for(tokens) - len(here)
        return new + self.full.idle(here) + spare + self.claimed <= self.full.free

    def admit(self, found: Tables, tokens: int, end: int) -> Tables:
        """A sequence's tables: what was found, with pages of its own for those that are away, and pages for
        its tokens where no window bounds them. It `fits`."""
        for g, (pool, pages) in enumerate(zip(self.pools, found, strict=True)):
            pool.share(page for page in pages if page >= 0)
            self.reserved[g] += self._charge(g, end)
        tables = [
            [pool.issue(1)[0] if page == AWAY else page for page in pages]
            for pool, pages in zip(self.pools, found, strict=True)
        ]
        grown = self.grow(tables, tokens)
        assert grown
        return tables

    def grow(self, tables: Tables, tokens: int) -> bool:
        """Issue the pages of a sequence's first `tokens` tokens in groups without a window; False if too few
        are free."""
        if self.full is None:
            return True
        need = self._pages_for(tokens) - len(tables[0])
        if need > self.full.free:
            return False
        if need > 0:
            tables[0] += self.full.issue(need)
        return True

    def advance(self, tables: Tables, start: int, end: int, marks: Collection[int] | None = None) -> None:
        """Before tokens [start, end) are computed: windowed groups get their pages, and release what is
        behind. Where a prefill computes them, states are kept in the pages that are `marks`, at strides, and
        in the last; one by one, in all."""
        for g, (window, pages) in enumerate(zip(self.windows, tables, strict=True)):
            if window is None:
                continue
            first = min(self._first(g, start), len(pages))
            self._leave(g, pages, first)
            sparse = window == STATE and marks is not None
            for i in range(len(pages), self._pages_for(end)):
                kept = not sparse or self._stays(i, marks or ()) or (i + 1) * self.page_size >= end
                pages.append(self.pools[g].issue(1)[0] if kept else GONE)

    def _leave(self, g: int, pages: list[int], first: int) -> None:
        """Release a sequence's pages before the first that it still sees."""
        low = max(0, first - self.passed)
        own = [page for page in pages[low:first] if page != GONE]
        if own:
            self.pools[g].release(own)
            pages[low:first] = [GONE] * (first - low)

    def _stays(self, i: int, marks: Collection[int]) -> bool:
        """True if the state after page i can be found again."""
        return (i + 1) % self.stride == 0 or i in marks

    def marks(self, names: Sequence[bytes], found: Tables) -> tuple[int, ...]:
        """Pages of a prompt, whose full ones have these names, behind which its states are worth keeping: the
        last full one, and the last whose keys are here, where others with the same beginning have parted."""
        if STATE not in self.windows or not names:
            return ()
        least = max(1, BLOCK // self.page_size)
        here = takewhile(lambda name: self.full and self.full.find(name) is not None, names)
        ends = {n - n % least for n in (len(names), sum(1 for _ in here))}
        return tuple(end - 1 for end in sorted(ends) if end > len(found[0]))

    def listen(self, listener: PageListener) -> None:
        """Report changes of the first group's prefix cache to a listener."""
        self.pools[0].listener = listener

    def name(
        self,
        tables: Tables,
        names: Sequence[bytes],
        since: int,
        tokens: Sequence[int],
        marks: Collection[int] = (),
    ) -> None:
        """Let a sequence's full pages be found from number `since` on; of states those that stay."""
        for window, pool, pages in zip(self.windows, self.pools, tables, strict=True):
            for i in range(since, len(names)):
                if pages[i] != GONE and (window != STATE or self._stays(i, marks)):
                    is_new = pool.name(pages[i], names[i])
                    if is_new and pool.listener is not None:
                        page = tokens[i * self.page_size : (i + 1) * self.page_size]
                        pool.listener.stored(names[i - 1] if i else None, names[i], page)

    def release(self, tables: Tables, end: int) -> None:
        """Release all pages of a sequence, and its reservations."""
        for g, (pool, pages) in enumerate(zip(self.pools, tables, strict=True)):
            pool.release([page for page in pages if page != GONE])
            self.reserved[g] -= self._charge(g, end)

    @property
    def is_lending(self) -> bool:
        """True if pages are lent or claimed: a new sequence must then fit to its end beside them."""
        return bool(self.lent or self.claimed)

    def growth(self, pages: Tables, end: int) -> int:
        """Pages that a sequence of at most `end` tokens may still take where no window bounds it."""
        return 0 if self.full is None else max(0, self._pages_for(end) - len(pages[0]))

    def lend(self, count: int, spare: int) -> Tables | None:
        """`count` pages of each group for what is no sequence; None where that does not leave `spare` and all
        that is reserved. Then they are claimed, and lent once those that run have ended."""
        assert not self.lent
        for g, (pool, reserved) in enumerate(zip(self.pools, self.reserved, strict=True)):
            left = pool.free - spare if self.windows[g] is None else pool.pages - reserved
            if count > left:
                self.claimed = count
                return None
        self.lent, self.claimed = count, 0
        self.reserved = [n + count for n in self.reserved]
        return [pool.issue(count) for pool in self.pools]

    def take_back(self, lent: Tables) -> None:
        """Take back lent pages, which have no hashes."""
        self.lent = 0
        for g, (pool, pages) in enumerate(zip(self.pools, lent, strict=True)):
            pool.release(pages)
            self.reserved[g] -= len(pages)

    def forget(self) -> None:
        """Drop every name: the pages' contents are gone or belong to other weights."""
        for pool in self.pools:
            pool.forget()

    def _charge(self, g: int, end: int) -> int:
        """Pages that are reserved of a windowed group for a sequence of at most `end` tokens."""
        most = self.most[g]
        return 0 if most is None else min(most, self._pages_for(end))

    def _pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

"""Page tables of data-parallel shards: each has pools of its own, and a sequence's pages are all in one
shard."""

from collections.abc import Callable, Collection, Sequence
from operator import itemgetter

from .pool import PageListener
from .tables import Away, PageTables, Tables

AS_BUSY = 8  # sequences more or less in a shard that make no step wider


class ShardTables(list[list[int]]):
    """A sequence's tables, and the shard that its pages are in."""

    def __init__(self, tables: Tables, shard: int):
        super().__init__(tables)
        self.shard = shard


def shard_of(tables: Tables) -> int:
    """The shard of a sequence's pages; without shards 0."""
    return tables.shard if isinstance(tables, ShardTables) else 0


class ShardedPageTables(PageTables):
    """Page tables of all shards with the interface of one. Calls go to the shard of a sequence's pages; page
    numbers are the shard's own."""

    def __init__(self, make: Callable[[], PageTables], shards: int):
        self._shards = [make() for _ in range(shards)]
        self.windows, self.page_size = self._shards[0].windows, self._shards[0].page_size

    @property
    def shards(self) -> Sequence[PageTables]:
        return self._shards

    @property
    def occupancy(self) -> float:
        return max(shard.occupancy for shard in self.shards)

    def find(self, names: Sequence[bytes], away: Away | None = None) -> Tables:
        """Pages of the longest prefix, in the shard that has the longest."""
        return max(self.find_each(names), key=lambda found: len(found[0]))

    def find_each(self, names: Sequence[bytes]) -> list[ShardTables]:
        """Pages of the longest prefix that each shard has."""
        return [ShardTables(shard.find(names), i) for i, shard in enumerate(self.shards)]

    def in_order(self, names: Sequence[bytes], running: Sequence[int], most: int) -> list[ShardTables]:
        """Pages found in each shard with less than `most` running sequences, the best shard first: the least
        busy, and among about equally busy ones that with the longest prefix."""
        found = [(running[own.shard], own) for own in self.find_each(names) if running[own.shard] < most]
        ranked = [((n // AS_BUSY, -len(own[0]), n, own.shard), own) for n, own in found]
        return [own for _, own in sorted(ranked, key=itemgetter(0))]

    def fits(self, found: Tables, tokens: int, end: int, spare: int) -> bool:
        return self._of(found).fits(found, tokens, end, spare)

    def admit(self, found: Tables, tokens: int, end: int) -> Tables:
        return ShardTables(self._of(found).admit(found, tokens, end), shard_of(found))

    def grow(self, tables: Tables, tokens: int) -> bool:
        return self._of(tables).grow(tables, tokens)

    def advance(self, tables: Tables, start: int, end: int, marks: Collection[int] | None = None) -> None:
        self._of(tables).advance(tables, start, end, marks)

    def marks(self, names: Sequence[bytes], found: Tables) -> tuple[int, ...]:
        return self._of(found).marks(names, found)

    def listen(self, listener: PageListener) -> None:
        for shard in self.shards:
            shard.listen(listener)

    def name(
        self,
        tables: Tables,
        names: Sequence[bytes],
        since: int,
        tokens: Sequence[int],
        marks: Collection[int] = (),
    ) -> None:
        self._of(tables).name(tables, names, since, tokens, marks)

    def release(self, tables: Tables, end: int) -> None:
        self._of(tables).release(tables, end)

    def growth(self, pages: Tables, end: int) -> int:
        return self._of(pages).growth(pages, end)

    @property
    def is_lending(self) -> bool:
        return self.shards[0].is_lending

    def lend(self, count: int, spare: int) -> Tables | None:
        """Pages of the first shard, whose rows are those that shapes are compared by."""
        return self.shards[0].lend(count, spare)

    def take_back(self, lent: Tables) -> None:
        self.shards[0].take_back(lent)

    def forget(self) -> None:
        for shard in self.shards:
            shard.forget()

    def _of(self, tables: Tables) -> PageTables:
        return self.shards[shard_of(tables)]

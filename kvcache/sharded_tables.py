"""Page tables of data-parallel shards: each shard has its own pools, and a sequence's pages are all in one
shard."""

from collections.abc import Callable, Collection, Sequence
from operator import itemgetter

from .pool import PageListener
from .tables import PageTables, SequenceTables, TierLookup

SIMILAR_LOAD_SEQUENCES = 8  # shards whose numbers of sequences differ by less count as equally busy


class ShardTables(list[list[int]]):
    """Page tables of one sequence, with the shard that has its pages.

    shard: number of the shard
    """

    def __init__(self, tables: SequenceTables, shard: int):
        super().__init__(tables)
        self.shard = shard


def shard_number(tables: SequenceTables) -> int:
    """Return the number of the shard that has a sequence's pages; 0 without shards."""
    return tables.shard if isinstance(tables, ShardTables) else 0


class ShardedPageTables(PageTables):
    """Page tables of all shards, with the interface of one. A call goes to the shard of its sequence. Page
    numbers are relative to that shard."""

    def __init__(self, make_tables: Callable[[], PageTables], shards: int):
        self._shards = [make_tables() for _ in range(shards)]
        self.windows, self.page_size = self._shards[0].windows, self._shards[0].page_size

    @property
    def shards(self) -> Sequence[PageTables]:
        """Page tables of each shard."""
        return self._shards

    @property
    def occupancy(self) -> float:
        """Share of the pages that sequences own, in the shard and group where it is highest."""
        return max(shard.occupancy for shard in self.shards)

    def find_prefix(self, hashes: Sequence[bytes], tier_lookup: TierLookup | None = None) -> SequenceTables:
        """Return the pages of the longest cached prefix, in the shard that has the longest."""
        return max(self.find_shard_prefixes(hashes), key=lambda prefix: len(prefix[0]))

    def find_shard_prefixes(self, hashes: Sequence[bytes]) -> list[ShardTables]:
        """Return the pages of the longest cached prefix in each shard."""
        return [ShardTables(shard.find_prefix(hashes), i) for i, shard in enumerate(self.shards)]

    def rank_shard_prefixes(
        self, hashes: Sequence[bytes], running: Sequence[int], max_running: int
    ) -> list[ShardTables]:
        """Return the cached prefix in each shard with less than `max_running` running sequences, the best
        shard first. The least busy shard is best; among about equally busy ones, the one with the longest
        prefix."""
        candidates = [
            (running[prefix.shard], prefix)
            for prefix in self.find_shard_prefixes(hashes)
            if running[prefix.shard] < max_running
        ]
        ranked = [
            ((n // SIMILAR_LOAD_SEQUENCES, -len(prefix[0]), n, prefix.shard), prefix)
            for n, prefix in candidates
        ]
        return [prefix for _, prefix in sorted(ranked, key=itemgetter(0))]

    def fits(self, prefix: SequenceTables, tokens: int, max_tokens: int, spare_pages: int) -> bool:
        return self._shard_tables(prefix).fits(prefix, tokens, max_tokens, spare_pages)

    def admit(self, prefix: SequenceTables, tokens: int, max_tokens: int) -> SequenceTables:
        return ShardTables(self._shard_tables(prefix).admit(prefix, tokens, max_tokens), shard_number(prefix))

    def grow(self, tables: SequenceTables, tokens: int) -> bool:
        return self._shard_tables(tables).grow(tables, tokens)

    def advance_windows(
        self, tables: SequenceTables, start: int, end: int, state_checkpoints: Collection[int] | None = None
    ) -> None:
        self._shard_tables(tables).advance_windows(tables, start, end, state_checkpoints)

    def state_checkpoints(self, hashes: Sequence[bytes], prefix: SequenceTables) -> tuple[int, ...]:
        return self._shard_tables(prefix).state_checkpoints(hashes, prefix)

    def set_listener(self, listener: PageListener) -> None:
        for shard in self.shards:
            shard.set_listener(listener)

    def cache_pages(
        self,
        tables: SequenceTables,
        hashes: Sequence[bytes],
        first: int,
        tokens: Sequence[int],
        state_checkpoints: Collection[int] = (),
        salt: bytes = b"",
    ) -> None:
        self._shard_tables(tables).cache_pages(tables, hashes, first, tokens, state_checkpoints, salt)

    def drop_hashes(self, tables: SequenceTables) -> None:
        self._shard_tables(tables).drop_hashes(tables)

    def release(self, tables: SequenceTables, max_tokens: int) -> None:
        self._shard_tables(tables).release(tables, max_tokens)

    def reset_prefix_cache(self) -> None:
        for shard in self.shards:
            shard.reset_prefix_cache()

    def _shard_tables(self, tables: SequenceTables) -> PageTables:
        """Return the page tables of the shard that has a sequence's pages."""
        return self.shards[shard_number(tables)]

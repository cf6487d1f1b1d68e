"""Pages beyond the pools: what the pools lose is kept in tiers, and fetched while its prompt waits in line.

Swapping to the host's memory is vLLM's (Kwon et al., arXiv 2309.06180), a prefix cache as large as the host
allows Mooncake's (Qin et al., arXiv 2407.00079). A page that does not arrive is computed: tiers change when
tokens come, never which.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import jax

from ....kvcache.pages import KVCache
from ....kvcache.tables import AWAY, PageTables, Tables
from ...host.streams import warn
from ...runtime.compiled.transfers import MOST
from .mover import PageFetch, PageMover
from .snapshot import named_pages
from .tier import Key, TierChain, key_of, window_of

ROUNDS = 3  # in which pages are fetched for one admission: some may be evicted while others come
TRIES = 16  # pages are fetched every so many times though it does not pay: rates change
PATIENCE = 4.0, 0.5  # a fetch may take so many times what computing takes, and so many seconds
PAUSE = 0.02  # seconds
WRITING = 60.0  # seconds that the end of an engine waits for files
AHEAD = 1 << 26  # bytes that are on their way then


class NoOffload:
    """Where an engine without tiers finds pages: in its pools alone."""

    def __init__(self, tables: PageTables):
        self.tables = tables

    def expect(
        self, prompt: Sequence[int], names: Sequence[bytes], source: str | None = None
    ) -> PageFetch | None:
        """A prompt whose pages have these names comes into line: another engine is asked to compute it, if
        there is one, and of several the one at the address `source`."""

    def find(self, names: Sequence[bytes], ticket: PageFetch | None) -> Tables:
        """Pages of the longest prefix that is here, has been fetched, or may yet be fetched."""
        return self.tables.find(names)

    def look(
        self, names: Sequence[bytes], ticket: PageFetch | None
    ) -> tuple[Tables | None, PageFetch | None]:
        """What is found of a prompt that is first in line, all of it here or arrived; None while it waits.
        What is in tiers is asked for, with a ticket."""
        return self.tables.find(names), None

    def admit(
        self,
        found: Tables,
        names: Sequence[bytes],
        tokens: Sequence[int],
        pages: Tables,
        ticket: PageFetch | None,
    ) -> None:
        """A prompt has got pages of its own for those that have been fetched: from now on they are found
        there."""

    def drop(self, ticket: PageFetch | None) -> None:
        """Nobody wants a ticket any more."""

    def pause(self) -> None:
        """What an engine does that waits for pages alone."""

    def step(self, cache: KVCache, tickets: Iterable[PageFetch | None]) -> KVCache:
        """Copy the pages that have lost their names before anything is written over them; then put those that
        have been fetched into their places."""
        return cache

    def lose(self) -> None:
        """Pages that have lost their names are written over already."""

    def replaced(self, params: Any) -> None:
        """Pages of other parameters from now on."""

    def woke(self, params: Any) -> None:
        """The parameters may be there again."""

    def close(self, cache: KVCache | None) -> None:
        """Keep what can be found in the cache, if there is one, where it outlives the process; then end."""

    def report(self) -> dict[str, Any]:
        """Pages by what became of them, the rule by which they are kept and fetched, and each tier."""
        return {}


class KVOffloader(NoOffload):
    """What an engine has in tiers. The prompt that is first in line is looked up by `look` and waits while
    its pages come; `admit` gives them places, and `step` puts them there, before the step's programs.

    Fetching pays where it takes less time than computing, by the measured rates of both; it is tried until
    both are known. Where it does not pay pages are neither kept nor fetched.
    """

    def __init__(self, mover: PageMover, tables: PageTables, token_seconds: Callable[[], float | None]):
        super().__init__(tables)
        self.mover, self.token_seconds = mover, token_seconds
        self.kept = self.left_out = self.fetched = self.refused = self.late = 0  # pages
        self._asked = 0
        self._last: PageFetch | None = None
        for pool in tables.pools:
            pool.evicted = []

    # ------------------------------------------------------------ a prompt in line

    def expect(
        self, prompt: Sequence[int], names: Sequence[bytes], source: str | None = None
    ) -> PageFetch | None:
        peer = self.mover.peer
        if peer is None or len(self.find(names, None)[0]) == len(names):
            return None
        ask = peer.ask(prompt, len(names), source)
        return None if ask is None else PageFetch(ask)

    def find(self, names: Sequence[bytes], ticket: PageFetch | None) -> Tables:
        arrived = set() if ticket is None else ticket.arrived
        more = ticket is None or ticket.rounds < ROUNDS

        def is_away(g: int, name: bytes) -> bool:
            key = key_of(name, g)
            return key in arrived or (more and self.mover.has(key))

        return self.tables.find(names, is_away)

    def look(
        self, names: Sequence[bytes], ticket: PageFetch | None
    ) -> tuple[Tables | None, PageFetch | None]:
        if ticket is not None and self._awaits(ticket):
            self._last = ticket
            return None, ticket
        found, arrived = self.find(names, ticket), set() if ticket is None else ticket.arrived
        lacking = [key for key in away(found, names) if key not in arrived]
        if not lacking:
            return found, ticket
        ticket = ticket or PageFetch()
        if ticket.is_pending:
            return None, ticket
        self._ask(lacking, ticket)
        return self.look(names, ticket)  # which waits, unless nothing more is asked for or all is here

    def _awaits(self, ticket: PageFetch) -> bool:
        """Whether another engine may still compute a prompt in time."""
        peer, ask = self.mover.peer, ticket.ask
        return peer is not None and ask is not None and peer.awaits(ask)

    def _ask(self, keys: list[Key], ticket: PageFetch) -> None:
        """One more round, unless the last is late, or fetching does not pay."""
        if ticket.is_late:
            self.late += ticket.pages
            ticket.rounds = ROUNDS
        elif not self._try():
            self.refused += len(keys)
            ticket.rounds = ROUNDS
        else:
            ticket.pages, self._last = len(keys), ticket
            self.mover.fetch(keys, ticket, self._patience(len(keys)))

    def admit(
        self,
        found: Tables,
        names: Sequence[bytes],
        tokens: Sequence[int],
        pages: Tables,
        ticket: PageFetch | None,
    ) -> None:
        if ticket is not None:
            ticket.places = {
                key_of(names[i], g): pages[g][i]
                for g, those in enumerate(found)
                for i, page in enumerate(those)
                if page == AWAY
            }
            self.tables.name(pages, names[: len(found[0])], 0, tokens)

    def drop(self, ticket: PageFetch | None) -> None:
        if ticket is not None and not ticket.dropped:
            self.mover.taken(ticket)

    def pause(self) -> None:
        last = self._last
        if last is None or last.dropped:
            return
        if last.ask is not None and not last.ask.done.is_set():
            last.ask.done.wait(PAUSE)
        elif last.is_pending and last.pending is not None:
            last.pending.wait(PAUSE)

    # ------------------------------------------------------------ on the device, in the engine's order

    def step(self, cache: KVCache, tickets: Iterable[PageFetch | None]) -> KVCache:
        for g, pool in enumerate(self.tables.pools):
            evicted, pool.evicted = pool.evicted or [], []
            if evicted and self.mover.tier.keeps and self.pays is not False:
                self.keep(cache, g, {key_of(name, g): page for page, name in evicted})
        for ticket in tickets:
            if ticket is not None:
                cache = self._fill(cache, ticket)
        return cache

    def keep(self, cache: KVCache, window: int, pages: dict[Key, int]) -> None:
        """Offer pages that no tier has, as many as may be on their way."""
        lacking = [key for key in pages if not self.mover.has(key)]
        for i in range(0, len(lacking), MOST):
            keys = lacking[i : i + MOST]
            try:
                self._offer(cache, window, keys, [pages[key] for key in keys])
            except jax.errors.JaxRuntimeError:  # such as a device without memory for copies
                self.left_out += len(keys)

    def _offer(self, cache: KVCache, window: int, keys: Sequence[Key], pages: Sequence[int]) -> None:
        if self.mover.has_room(window, len(keys)):
            self.mover.offer(keys, self.mover.transfers.gather(cache, window, pages))
            self.kept += len(keys)
        else:
            self.left_out += len(keys)

    def lose(self) -> None:
        for pool in self.tables.pools:
            pool.evicted = []

    def replaced(self, params: Any) -> None:
        self.mover.replaced(params)

    def woke(self, params: Any) -> None:
        if not self.mover.tier.whole:
            self.mover.replaced(params)

    def close(self, cache: KVCache | None) -> None:
        """The same, in at most WRITING seconds: a disk that hangs keeps no process."""
        self.mover.close()
        lasting, until, lost = self.mover.tier.lasting, time.monotonic() + WRITING, 0
        if cache is not None and lasting.tiers:
            lost = self._keep_named(cache, lasting, until)
        lost += lasting.settle(until)
        if lost and time.monotonic() > until:
            warn(f"{lost} pages were not written within {WRITING:g} seconds: they are computed again")

    def _keep_named(self, cache: KVCache, lasting: TierChain, until: float) -> int:
        """Offer all pages that can be found by name until a time; gives how many could not be."""
        names = ((name, g) for g, pool in enumerate(self.tables.pools) for name, _ in pool.named())
        left = sum(not lasting.has(key_of(*name)) for name in names)
        with suppress(jax.errors.JaxRuntimeError):  # of a device that has failed
            for key, content in named_pages(cache, self.tables, self.mover.transfers, lasting):
                lasting.settle(until, AHEAD)
                if time.monotonic() > until:
                    break
                lasting.offer(key, content)
                left -= 1
        return left

    def _fill(self, cache: KVCache, ticket: PageFetch) -> KVCache:
        for keys, leaves in ticket.parts:
            pages = [ticket.places.pop(key, None) for key in keys]
            if wanted := sum(page is not None for page in pages):
                cache = self.mover.transfers.scatter(cache, window_of(keys[0]), leaves, pages)
                self.fetched += wanted
        assert not ticket.places
        self.mover.taken(ticket)
        return cache

    # ------------------------------------------------------------ what pays

    @property
    def fetch_seconds(self) -> float | None:
        """Of the pages of all windows of as many tokens as a page has; None before some were fetched."""
        one = self.mover.byte_seconds
        return None if one is None else sum(self.mover.transfers.page_bytes) * one

    @property
    def compute_seconds(self) -> float | None:
        """Of as many tokens as a page has; None before a prompt was computed."""
        one = self.token_seconds()
        return None if one is None else one * self.tables.page_size

    @property
    def pays(self) -> bool | None:
        """Whether a page is fetched in less time than it is computed; None where that is not known."""
        fetch, compute = self.fetch_seconds, self.compute_seconds
        return None if fetch is None or compute is None else fetch < compute

    def _try(self) -> bool:
        self._asked += 1
        if self.mover.peer is not None:
            return True  # what was computed elsewhere is not computed here, whatever it costs
        return self.pays is not False or self._asked % TRIES == 0

    def _patience(self, pages: int) -> float:
        times, least = PATIENCE
        return max(least, times * pages * (self.compute_seconds or least))

    def report(self) -> dict[str, Any]:
        rule = {"page_fetch_seconds": self.fetch_seconds, "page_compute_seconds": self.compute_seconds}
        pages = {n: getattr(self, n) for n in ("kept", "left_out", "fetched", "refused", "late")}
        return {"tiers": pages | rule | {"pays": self.pays} | self.mover.tier.report()}


def away(found: Tables, names: Sequence[bytes]) -> list[Key]:
    """Keys of the pages that are in tiers."""
    return [key_of(names[i], g) for g, pages in enumerate(found) for i, p in enumerate(pages) if p == AWAY]

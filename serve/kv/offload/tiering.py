"""KV offload: pages that the pools evict are kept in tiers, and fetched while their prompt waits in the
queue.

Swapping to the host's memory is vLLM's (Kwon et al., arXiv 2309.06180), a prefix cache in the host's memory
Mooncake's (Qin et al., arXiv 2407.00079). A page that does not arrive is computed: tiers change when tokens
come, never which tokens.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import jax

from ....kvcache.pages import KVCache
from ....kvcache.tables import AWAY, PageTables, Tables
from ...host.streams import warn
from ...runtime.compiled.transfers import MOST
from .mover import PageFetch, PageMover
from .snapshot import named_pages
from .tier import Key, TierChain, key_of, window_of

ROUNDS = 3  # fetches for one admission, at most: pages may be evicted while others come
TRIES = 16  # where fetching does not pay, one of TRIES requests fetches all the same: rates change
PATIENCE = 4.0, 0.5  # limit of a fetch: a multiple of the seconds of computing, and at least these seconds
PAUSE = 0.02  # seconds that an idle engine waits for pages
WRITING = 60.0  # seconds that the end of an engine waits for files, at most
AHEAD = 1 << 26  # bytes that wait to be written then, at most

Ticket = PageFetch | None


class PageFinder(Protocol):
    """Finds the pages of prompts, in the pools and in other places. The engine's thread calls it.

    A request in the queue has a `ticket`: the fetch of its pages, None while there is none. Methods without a
    result do nothing by default.
    """

    tables: PageTables

    def expect(self, prompt: Sequence[int], names: Sequence[bytes], source: str | None = None) -> Ticket:
        """Have another engine compute a prompt that joins the queue, if there is one; of several,
        preferably the one at the address `source`. `names` are those of the prompt's full pages."""
        ...

    def find(self, names: Sequence[bytes], ticket: Ticket) -> Tables:
        """Return pages of the longest prefix that is here, has been fetched, or may yet be fetched."""
        ...

    def look(self, names: Sequence[bytes], ticket: Ticket) -> tuple[Tables | None, Ticket]:
        """Return the pages of the prompt at the head of the queue, all of them here or arrived; None while it
        waits. Pages that are in tiers are fetched, under the ticket that is also returned."""
        ...

    def admit(
        self, found: Tables, names: Sequence[bytes], tokens: Sequence[int], pages: Tables, ticket: Ticket
    ) -> None:
        """Take the pages of the pools that a prompt has got for those that have been fetched: from now on
        they are found there."""

    def drop(self, ticket: Ticket) -> None:
        """Give a ticket up."""

    def pause(self) -> None:
        """Wait a moment for pages, in an engine that has nothing else to do."""

    def step(self, cache: KVCache, tickets: Iterable[Ticket]) -> KVCache:
        """Copy the pages that have lost their names before anything is written over them; then put those that
        have been fetched into their places."""
        ...

    def lose(self) -> None:
        """Forget the pages that have lost their names: they are written over already."""

    def replaced(self, params: Any) -> None:
        """Find pages of other parameters from now on."""

    def woke(self, params: Any) -> None:
        """Use parameters that may be there again after a sleep."""

    def close(self, cache: KVCache | None) -> None:
        """Keep what can be found in the cache, if there is one, where it outlives the process; then end."""

    def report(self) -> dict[str, Any]:
        """Return pages by what became of them, the rule by which they are kept and fetched, and each tier."""
        ...


class NoOffload(PageFinder):
    """Finds pages in the pools alone."""

    def __init__(self, tables: PageTables):
        self.tables = tables

    def expect(self, prompt: Sequence[int], names: Sequence[bytes], source: str | None = None) -> Ticket:
        return None

    def find(self, names: Sequence[bytes], ticket: Ticket) -> Tables:
        return self.tables.find(names)

    def look(self, names: Sequence[bytes], ticket: Ticket) -> tuple[Tables | None, Ticket]:
        return self.tables.find(names), None

    def step(self, cache: KVCache, tickets: Iterable[Ticket]) -> KVCache:
        return cache

    def report(self) -> dict[str, Any]:
        return {}


class KVOffloader:
    """Finds an engine's pages in its pools and in tiers. `look` looks the prompt at the head of the queue up,
    which waits while its pages come; `admit` assigns them pages of the pools, and `step` copies them there
    before the step's programs.

    Fetching pays where it takes less time than computing, by the measured rates of both; it is tried until
    both are known. Where it does not pay pages are neither kept nor fetched.
    """

    def __init__(self, mover: PageMover, tables: PageTables, token_seconds: Callable[[], float | None]):
        self.tables, self.mover, self.token_seconds = tables, mover, token_seconds
        self.kept = self.left_out = self.fetched = self.refused = self.late = 0  # pages
        self._asked = 0
        self._last: Ticket = None
        for pool in tables.pools:
            pool.evicted = []

    # ------------------------------------------------------------ a prompt in the queue

    def expect(self, prompt: Sequence[int], names: Sequence[bytes], source: str | None = None) -> Ticket:
        peer = self.mover.peer
        if peer is None or len(self.find(names, None)[0]) == len(names):
            return None
        ask = peer.ask(prompt, len(names), source)
        return None if ask is None else PageFetch(ask)

    def find(self, names: Sequence[bytes], ticket: Ticket) -> Tables:
        arrived = set() if ticket is None else ticket.arrived
        more = ticket is None or ticket.rounds < ROUNDS

        def is_away(g: int, name: bytes) -> bool:
            key = key_of(name, g)
            return key in arrived or (more and self.mover.has(key))

        return self.tables.find(names, is_away)

    def look(self, names: Sequence[bytes], ticket: Ticket) -> tuple[Tables | None, Ticket]:
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
        """Return whether another engine may still compute a prompt in time."""
        peer, ask = self.mover.peer, ticket.ask
        return peer is not None and ask is not None and peer.awaits(ask)

    def _ask(self, keys: list[Key], ticket: PageFetch) -> None:
        """Start a fetch, unless the last one is late or fetching does not pay."""
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
        self, found: Tables, names: Sequence[bytes], tokens: Sequence[int], pages: Tables, ticket: Ticket
    ) -> None:
        if ticket is not None:
            ticket.places = {
                key_of(names[i], g): pages[g][i]
                for g, those in enumerate(found)
                for i, page in enumerate(those)
                if page == AWAY
            }
            self.tables.name(pages, names[: len(found[0])], 0, tokens)

    def drop(self, ticket: Ticket) -> None:
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

    def step(self, cache: KVCache, tickets: Iterable[Ticket]) -> KVCache:
        for g, pool in enumerate(self.tables.pools):
            evicted, pool.evicted = pool.evicted or [], []
            if evicted and self.mover.tier.keeps and self.pays is not False:
                self.keep(cache, g, {key_of(name, g): page for page, name in evicted})
        for ticket in tickets:
            if ticket is not None:
                cache = self._fill(cache, ticket)
        return cache

    def keep(self, cache: KVCache, window: int, pages: dict[Key, int]) -> None:
        """Offer pages that no tier has, as many as the mover has room for."""
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
        """End in at most WRITING seconds: a disk that hangs must not keep the process."""
        self.mover.close()
        lasting, until, lost = self.mover.tier.lasting, time.monotonic() + WRITING, 0
        if cache is not None and lasting.tiers:
            lost = self._keep_named(cache, lasting, until)
        lost += lasting.settle(until)
        if lost and time.monotonic() > until:
            warn(f"{lost} pages were not written within {WRITING:g} seconds: they are computed again")

    def _keep_named(self, cache: KVCache, lasting: TierChain, until: float) -> int:
        """Offer all pages that can be found by name until a time; returns the number of those left."""
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
        """Seconds to fetch one page of each window; None before pages were fetched."""
        one = self.mover.byte_seconds
        return None if one is None else sum(self.mover.transfers.page_bytes) * one

    @property
    def compute_seconds(self) -> float | None:
        """Seconds to compute the tokens of one page; None before a prompt was computed."""
        one = self.token_seconds()
        return None if one is None else one * self.tables.page_size

    @property
    def pays(self) -> bool | None:
        """True where a page is fetched in less time than it is computed; None where that is not known."""
        fetch, compute = self.fetch_seconds, self.compute_seconds
        return None if fetch is None or compute is None else fetch < compute

    def _try(self) -> bool:
        self._asked += 1
        if self.mover.peer is not None:
            return True  # the prefill engine has computed it already
        return self.pays is not False or self._asked % TRIES == 0

    def _patience(self, pages: int) -> float:
        times, least = PATIENCE
        return max(least, times * pages * (self.compute_seconds or least))

    def report(self) -> dict[str, Any]:
        rule = {"page_fetch_seconds": self.fetch_seconds, "page_compute_seconds": self.compute_seconds}
        pages = {n: getattr(self, n) for n in ("kept", "left_out", "fetched", "refused", "late")}
        return {"tiers": pages | rule | {"pays": self.pays} | self.mover.tier.report()}


def away(found: Tables, names: Sequence[bytes]) -> list[Key]:
    """Return the keys of the pages that are in tiers."""
    return [key_of(names[i], g) for g, pages in enumerate(found) for i, p in enumerate(pages) if p == AWAY]

"""Prompts that another engine has computed, in simulated time: when their pages are here, and that they are
found."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ....kvcache.tables import PageTables, Tables
from ...kv.offload.mover import PageFetch
from ...kv.offload.tiering import NoOffload
from .run import Simulation


@dataclass
class SimulatedLink:
    """A way for pages, which go one behind the other; a token's keys take so many seconds."""

    token_seconds: float = 0.0
    free: float = 0.0

    def carried(self, moment: float, tokens: int) -> float:
        """When so many tokens' keys have arrived that are sent from a moment on."""
        self.free = max(moment, self.free) + tokens * self.token_seconds
        return self.free


class SimulatedRemotePages(NoOffload):
    """Where an engine finds the pages of prompts that were computed for it: a prompt comes into line when
    they are all there. Those that it gives up later are computed here."""

    def __init__(self, tables: PageTables):
        super().__init__(tables)
        self._there: set[bytes] = set()

    def expect(
        self, prompt: Sequence[int], names: Sequence[bytes], source: str | None = None
    ) -> PageFetch | None:
        self._there.update(names)
        return None

    def find(self, names: Sequence[bytes], ticket: PageFetch | None) -> Tables:
        return self.tables.find(names, lambda group, name: name in self._there)

    def look(
        self, names: Sequence[bytes], ticket: PageFetch | None
    ) -> tuple[Tables | None, PageFetch | None]:
        return self.find(names, ticket), ticket

    def admit(
        self,
        found: Tables,
        names: Sequence[bytes],
        tokens: Sequence[int],
        pages: Tables,
        ticket: PageFetch | None,
    ) -> None:
        own = names[: len(found[0])]
        self.tables.name(pages, own, 0, tokens)
        self._there.difference_update(own)


def handed_to(simulations: Iterable[Simulation]) -> None:
    """Let engines find what was computed for them."""
    for own in simulations:
        own.engine.scheduler.tiers = SimulatedRemotePages(own.engine.tables)

"""Service that computes prompts for a decode engine, in this process or in another."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ..offload.tier import Content, Key

# called once with the keys of the pages that can be fetched; with none after a failure
Ready = Callable[[Sequence[Key]], None]


class PrefillService(Protocol):
    """Engine that computes prompts. No method raises, and only `fetch` blocks."""

    @property
    def is_here(self) -> bool:
        """True while prompts can be sent."""
        ...

    @property
    def room(self) -> int:
        """Bytes of pages that it keeps until they are fetched."""
        ...

    def begin(self, prompt: Sequence[int], ready: Ready) -> int:
        """Compute a prompt; returns its number."""
        ...

    def leave(self, number: int) -> None:
        """Cancel a prompt; `ready` need not be called for it."""
        ...

    def fetch(self, key: Key) -> Content | None:
        """Return a page as it was computed, or None."""
        ...

    def renew(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        """Want pages of another realm from now on, or none; `page_bytes` is the size of a page of each
        window."""
        ...

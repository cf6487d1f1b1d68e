"""Service that computes prompts for a decode engine, in this process or in another."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ..offload.tier import PageContent, PageKey

# called once, with the keys of the pages that can be fetched; without keys after a failure
OnReady = Callable[[Sequence[PageKey]], None]


class PrefillService(Protocol):
    """Engine that computes prompts for this one. No method raises, and only `fetch` blocks."""

    @property
    def is_connected(self) -> bool:
        """True while prompts can be sent."""
        ...

    @property
    def room_bytes(self) -> int:
        """Bytes of pages that the engine keeps until they are fetched."""
        ...

    def begin_prefill(self, prompt: Sequence[int], on_ready: OnReady, salt: bytes = b"") -> int:
        """Start to compute a prompt; returns its number. Its page hashes depend on the cache salt."""
        ...

    def cancel_prefill(self, number: int) -> None:
        """Cancel a prompt; `on_ready` need not be called for it."""
        ...

    def fetch(self, key: PageKey) -> PageContent | None:
        """Return a page's content, or None if the page is not available."""
        ...

    def expect_realm(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        """Accept pages of this realm only from now on, no pages if it is None. `page_bytes` has the bytes of
        a page of each window."""
        ...

"""Pages that a prefill engine computes for this engine, as tiers see them."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .tier import Content, Key, Tier


@dataclass(eq=False)
class RemotePrefill:
    """Future of a prompt that a prefill engine computes. `done` is set once it has, or has failed.

    pages: number of the prompt's full pages.
    """

    prompt: Sequence[int]
    pages: int
    at: str = ""  # the prefill engine's address, where there are several
    done: threading.Event = field(default_factory=threading.Event)
    number: int | None = None  # once it was sent
    until: float | None = None  # time (monotonic clock) when waiting ends, once it has begun
    released: bool = False


class RemoteKV(Tier, Protocol):
    """Read-only tier of pages that a prefill engine announces. Only `fetch` blocks; no method raises."""

    name, lasts = "peer", False

    @property
    def keeps(self) -> bool:
        """False: it stores no pages."""
        return False

    def ask(self, prompt: Sequence[int], pages: int, at: str | None = None) -> RemotePrefill | None:
        """Have a prompt with `pages` full pages computed, preferably by the engine `at` an address; None
        where no engine can be asked now."""
        ...

    def awaits(self, ask: RemotePrefill) -> bool:
        """Return whether the request at the head of the queue should still wait for its prompt; its time
        begins with the first call."""
        ...

    def release(self, ask: RemotePrefill) -> None:
        """Stop waiting for a prompt: its pages are here, or not wanted any more."""
        ...

    def renew(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        """Want pages of a realm from now on, `page_bytes` for each window; None: no pages."""
        ...

    def offer(self, key: Key, content: Content) -> None:
        """Do nothing: the prefill engine keeps what it computes."""

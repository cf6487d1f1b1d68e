"""Protocol of the tier whose pages a prefill engine computes for this engine."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .tier import PageContent, PageKey, Tier


@dataclass(eq=False)
class RemotePrefill:
    """Future of a prompt that a prefill engine computes.

    prompt: token ids.
    num_pages: number of the prompt's full pages.
    salt: cache salt of the prompt.
    address: address of the prefill engine, if there are several.
    done: set when the prompt is computed, or has failed.
    number: number of the prompt in the service; None before it is sent.
    deadline: time when the request's waiting ends, seconds of the tier's clock; None before it has begun.
    is_released: True once no request waits for the prompt.
    """

    prompt: Sequence[int]
    num_pages: int
    salt: bytes = b""
    address: str = ""
    done: threading.Event = field(default_factory=threading.Event)
    number: int | None = None
    deadline: float | None = None
    is_released: bool = False


class RemoteKV(Tier, Protocol):
    """Read-only tier of pages that a prefill engine announces. Only `fetch` blocks; no method raises."""

    name, is_persistent = "peer", False

    @property
    def is_writable(self) -> bool:
        """False: this tier stores no pages."""
        return False

    def request_prefill(
        self, prompt: Sequence[int], num_pages: int, address: str | None = None, salt: bytes = b""
    ) -> RemotePrefill | None:
        """Request a prefill of a prompt with `num_pages` full pages and a cache salt, preferably from the
        engine at `address`. Returns None if no engine is available now."""
        ...

    def should_wait(self, prefill: RemotePrefill) -> bool:
        """Return True if the request at the head of the queue should still wait for its prompt. Its waiting
        time begins with the first call."""
        ...

    def release_prefill(self, prefill: RemotePrefill) -> None:
        """Stop waiting for a prompt, whose pages have arrived or are not wanted any more."""
        ...

    def expect_realm(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        """Accept pages of this realm only from now on, no pages if it is None. `page_bytes` has the bytes of
        a page of each window."""
        ...

    def offer(self, key: PageKey, content: PageContent) -> None:
        """Do nothing: the prefill engine keeps the pages that it computes."""

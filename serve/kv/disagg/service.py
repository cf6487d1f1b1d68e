"""Where prompts are computed for another engine, in this process or far away."""

from collections.abc import Callable, Sequence
from typing import Protocol

from ..offload.tier import Content, Key

Ready = Callable[
    [Sequence[Key]], None
]  # told of the pages that can be fetched, once; of none where it failed


class PrefillService(Protocol):
    """An engine that computes prompts. None of its methods raises, and none waits but `fetch`."""

    @property
    def is_here(self) -> bool:
        """Whether it can be asked now."""
        ...

    @property
    def room(self) -> int:
        """Bytes of pages that it keeps until they are fetched."""
        ...

    def begin(self, prompt: Sequence[int], ready: Ready) -> int:
        """Compute a prompt; gives its number."""
        ...

    def leave(self, number: int) -> None:
        """Nobody wants a prompt any more; then it need not be told of."""
        ...

    def fetch(self, key: Key) -> Content | None:
        """A page as it was computed, or None."""
        ...

    def renew(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        """Pages of another realm are wanted from now on, or of none."""
        ...

"""Another engine that computes prompts, as one sees it that fetches their pages."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .tier import Content, Key, Tier


@dataclass(eq=False)
class RemotePrefill:
    """A prompt that another engine is asked to compute. `done` says that it has, or that it will not."""

    prompt: Sequence[int]
    pages: int
    at: str = ""  # the other engine's address, where there are several
    done: threading.Event = field(default_factory=threading.Event)
    number: int | None = None  # once the other engine was asked
    until: float | None = None  # the time when nobody waits any more, once somebody does
    released: bool = False


class RemoteKV(Tier, Protocol):
    """Pages that another engine has computed for this one, which takes none and looks for none: it is told.
    No method waits but `fetch`, and none raises."""

    name, lasts = "peer", False

    @property
    def keeps(self) -> bool:
        """False: it takes no pages."""
        return False

    def ask(self, prompt: Sequence[int], pages: int, at: str | None = None) -> RemotePrefill | None:
        """Have a prompt of so many full pages computed, `at` an address rather than at others; None where
        nobody can be asked now."""
        ...

    def awaits(self, ask: RemotePrefill) -> bool:
        """Whether the first in line, who asks, waits for its prompt still: its time begins with the first
        question."""
        ...

    def release(self, ask: RemotePrefill) -> None:
        """The pages of a prompt are here, or nobody wants them any more."""
        ...

    def renew(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        """Pages of this realm are wanted from now on, each of a window of so many bytes; None: of none."""
        ...

    def offer(self, key: Key, content: Content) -> None:
        """Nothing: the other engine has what it computes."""

    def refresh(self) -> None:
        """Nothing: it tells."""

    def settle(self, until: float, most: int = 0) -> int:
        return 0

    def own(self) -> list[tuple[Key, Content]]:
        """None: they are the other engine's."""
        return []

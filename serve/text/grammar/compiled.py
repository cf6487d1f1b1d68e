"""Compiled grammars, and those of them that are kept."""

import weakref
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .constraint import mask_of

if TYPE_CHECKING:
    import llguidance

MOST_ITEMS = 10_000  # alternatives that a grammar may follow at one place: a token then takes up to 0.1 s
LIMITS: dict[str, Any] = {"max_items_in_row": MOST_ITEMS}
LARGE = 8 << 20  # bytes of a grammar that is worth giving back to the system at once


@dataclass(frozen=True, eq=False)
class Compiled:
    """A grammar that has read nothing, what it allows first, and the bytes that it takes, copies included."""

    matcher: "llguidance.LLMatcher"
    first: np.ndarray  # uint32 [words]
    bytes: int


def compiled(vocabulary: "llguidance.LLTokenizer", text: str, bytes: int) -> Compiled:
    """Raises ValueError where a grammar cannot be compiled, or allows nothing."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(vocabulary, text, log_level=0, limits=LLParserLimits(**LIMITS))
    try:
        return Compiled(matcher, mask_of(matcher), bytes)
    except ValueError as error:
        raise ValueError(f"structured_outputs is not allowed: {error}") from None


class GrammarCache:
    """Compiled grammars by their sources: those of the latest requests, as many as `most` bytes hold, and all
    that requests still have."""

    def __init__(self, most: int):
        self._most = most
        self._latest: OrderedDict[str, Compiled] = OrderedDict()
        self._alive: weakref.WeakValueDictionary[str, Compiled] = weakref.WeakValueDictionary()

    @property
    def alive(self) -> int:
        """Bytes of all that are in memory."""
        return sum(one.bytes for one in self._alive.values())

    @property
    def bytes(self) -> int:
        """Those of the ones that are kept."""
        return sum(one.bytes for one in self._latest.values())

    def get(self, text: str) -> Compiled | None:
        if (found := self._alive.get(text)) is not None:
            self.add(text, found)
        return found

    def add(self, text: str, new: Compiled) -> None:
        self._alive[text] = self._latest[text] = new
        self._latest.move_to_end(text)
        self.leave_room(0)

    def leave_room(self, bytes: int) -> None:
        """Drop the oldest until there is room for another one of this size."""
        taken = self.bytes + bytes
        while self._latest and taken > self._most:
            taken -= self._latest.popitem(last=False)[1].bytes

"""Calls told from a text as it comes."""

from collections.abc import Iterable

from .incoming import Event, Incoming
from .notation import Notation
from .tool import Tool

MANY = 1 << 20  # calls of a message


class CallReader:
    """Parts a message's text as it comes; `is_several` says whether there may be more than one call. How the
    text was cut makes no difference."""

    def __init__(self, notation: Notation, tools: Iterable[Tool], is_several: bool = True):
        self._coming = Incoming()
        known = {tool.name: tool for tool in tools}
        self._events = notation.events(self._coming, known, MANY if is_several else 1)

    def take(self, text: str, at_end: bool = False) -> list[Event]:
        """What has come since: text that is no part of a call, and calls piece by piece."""
        self._coming.text += text
        self._coming.is_over = at_end
        found: list[Event] = []
        for event in self._events:
            if event is None:
                break
            found.append(event)
        return found

"""Calls told from a text as it comes."""

from collections.abc import Iterable

from .notation import Notation
from .source import Event, Source
from .tool import Tool

MANY = 1 << 20  # calls of a message


class CallReader:
    """Parts a message's text as it comes; `is_several` says whether there may be more than one call. How the
    text was cut makes no difference."""

    def __init__(self, notation: Notation, tools: Iterable[Tool], is_several: bool = True):
        self._source = Source()
        known = {tool.name: tool for tool in tools}
        self._events = notation.events(self._source, known, MANY if is_several else 1)

    def take(self, text: str, at_end: bool = False) -> list[Event]:
        """What has come since: text that is no part of a call, and calls piece by piece."""
        self._source.text += text
        self._source.is_over = at_end
        found: list[Event] = []
        for event in self._events:
            if event is None:
                break
            found.append(event)
        return found

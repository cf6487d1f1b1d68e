"""Parser of a reply as it arrives: reasoning, answer, and tool calls."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..tokenizer.reasoning import Reasoning
from .stream_reader import Event, TextDelta, ToolCallArguments, ToolCallStart
from .tool_parser import ToolParser


@dataclass(frozen=True)
class ReasoningDelta:
    """Part of the reasoning."""

    text: str


Part = ReasoningDelta | Event


@dataclass
class ReplyParser:
    """Splits one reply into parts. `key` seeds the ids of its calls; `short` ids have nine letters and digits
    (Mistral)."""

    key: str
    reasoning: Reasoning | None = None
    parser: ToolParser | None = None
    short: bool = False
    _ids: list[str] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of calls that have begun."""
        return len(self._ids)

    def take(self, text: str, at_end: bool = False) -> list[Part]:
        thought = ""
        if self.reasoning is not None:
            thought, text = self.reasoning.take(text, at_end)
        found: list[Part] = [ReasoningDelta(thought)] if thought else []
        if self.parser is not None:
            return [*found, *(self._counted(event) for event in self.parser.take(text, at_end))]
        return [*found, TextDelta(text)] if text else found

    def _counted(self, event: Event) -> Event:
        """Return an event; the beginning of a call gets an id that no other call has."""
        if not isinstance(event, ToolCallStart):
            return event
        digits = hashlib.sha256(f"{self.key} {self.count}".encode()).hexdigest()
        own = digits[:9] if self.short else f"call_{digits[:24]}"
        id = own if event.id is None or event.id in self._ids else event.id
        self._ids.append(id)
        return ToolCallStart(event.name, id)


def text_of(parts: Iterable[Part], kind: type[ReasoningDelta] | type[TextDelta]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def call_deltas(parts: Iterable[Part], known: int) -> list[dict[str, Any]]:
    """Return a stream's additions to calls, one entry a call; `known` calls have begun before."""
    found: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, ToolCallStart):
            function = {"name": part.name, "arguments": ""}
            found.append({"index": known, "id": part.id, "type": "function", "function": function})
            known += 1
        elif isinstance(part, ToolCallArguments):
            if not found:
                found.append({"index": known - 1, "function": {"arguments": ""}})
            found[-1]["function"]["arguments"] += part.text
    return found


def whole_calls(parts: Iterable[Part]) -> list[dict[str, Any]]:
    return [{name: one[name] for name in ("id", "type", "function")} for one in call_deltas(parts, 0)]

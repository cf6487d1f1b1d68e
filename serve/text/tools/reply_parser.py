"""Parser of a reply as it arrives: reasoning, answer, and tool calls."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from ..tokenizer.reasoning_parser import ReasoningParser
from .stream_reader import ParserEvent, TextDelta, ToolCallArguments, ToolCallStart
from .tool_parser import ToolParser


@dataclass(frozen=True)
class ReasoningDelta:
    """Part of the reasoning."""

    text: str


ReplyPart = ReasoningDelta | ParserEvent


@dataclass
class ReplyParser:
    """Splitter of one reply into parts.

    call_id_seed: seed of the ids of its calls
    reasoning_parser: parser of the reasoning; None for a model that does not reason
    tool_parser: parser of tool calls; None if all text is the answer
    has_short_ids: whether ids of calls have nine letters and digits (Mistral)
    """

    call_id_seed: str
    reasoning_parser: ReasoningParser | None = None
    tool_parser: ToolParser | None = None
    has_short_ids: bool = False
    _ids: list[str] = field(default_factory=list)

    @property
    def num_calls(self) -> int:
        """Number of calls that have begun."""
        return len(self._ids)

    def parse_chunk(self, text: str, at_end: bool = False) -> list[ReplyPart]:
        thought = ""
        if self.reasoning_parser is not None:
            thought, text = self.reasoning_parser.parse_chunk(text, at_end)
        parts: list[ReplyPart] = [ReasoningDelta(thought)] if thought else []
        if self.tool_parser is not None:
            return [*parts, *(self._assign_id(event) for event in self.tool_parser.parse_chunk(text, at_end))]
        return [*parts, TextDelta(text)] if text else parts

    def _assign_id(self, event: ParserEvent) -> ParserEvent:
        """Return an event; the beginning of a call gets an id that no other call of the reply has."""
        if not isinstance(event, ToolCallStart):
            return event
        digits = hashlib.sha256(f"{self.call_id_seed} {self.num_calls}".encode()).hexdigest()
        new_id = digits[:9] if self.has_short_ids else f"call_{digits[:24]}"
        id = new_id if event.id is None or event.id in self._ids else event.id
        self._ids.append(id)
        return ToolCallStart(event.name, id)


def join_part_texts(parts: Iterable[ReplyPart], kind: type[ReasoningDelta] | type[TextDelta]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def call_deltas(parts: Iterable[ReplyPart], num_known: int) -> list[dict[str, Any]]:
    """Return a stream's additions to calls, one entry a call; `num_known` calls have begun before."""
    deltas: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, ToolCallStart):
            function = {"name": part.name, "arguments": ""}
            deltas.append({"index": num_known, "id": part.id, "type": "function", "function": function})
            num_known += 1
        elif isinstance(part, ToolCallArguments):
            if not deltas:
                deltas.append({"index": num_known - 1, "function": {"arguments": ""}})
            deltas[-1]["function"]["arguments"] += part.text
    return deltas


def list_whole_calls(parts: Iterable[ReplyPart]) -> list[dict[str, Any]]:
    return [{name: call[name] for name in ("id", "type", "function")} for call in call_deltas(parts, 0)]

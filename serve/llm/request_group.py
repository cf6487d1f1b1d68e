"""A caller's prompt in the engine: `n` requests, how far a stream has delivered them, and which groups have
ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...lora.request import LoRARequest
from ..engine.core.request import Request
from ..text.outputs import Delta


@dataclass(eq=False)
class RequestGroup:
    """`n` requests over one prompt, all with its id."""

    id: str
    prompt: str | None  # the text, if it was text
    requests: list[Request]
    lora_request: LoRARequest | None = None
    submitted: bool = False

    @classmethod
    def of_one(cls, **fields: Any) -> "RequestGroup":
        """Return the group of one request with these fields; its id is set at submission."""
        return cls("", None, [Request(id="", **fields)])

    @property
    def finished(self) -> bool:
        return all(request.finished for request in self.requests)


class StreamCursor:
    """Tokens and pieces of text of each completion that a stream has delivered; completions that were
    delivered to their end are removed."""

    def __init__(self, group: RequestGroup):
        self._requests = dict(enumerate(group.requests))
        self._places: dict[int, tuple[int, int]] = dict.fromkeys(self._requests, (0, 0))

    @property
    def at_end(self) -> bool:
        return not self._requests

    def take(self) -> list[Delta]:
        """Return the news since the last call."""
        found = []
        for index, request in list(self._requests.items()):
            tokens, pieces = self._places[index]
            new = request.tokens[len(request.prompt) + tokens :]
            text, pieces = request.text.after(pieces) if request.text else ("", 0)
            if new or text or request.finished:
                found.append(Delta(index, text, new, request.finish_reason))
            self._places[index] = tokens + len(new), pieces
            if request.finished:
                del self._requests[index]
        return found


class CompletionWatcher:
    """Groups that a caller waits for, and those of them that have ended, in the order of their ends."""

    def __init__(self, groups: Sequence[RequestGroup]):
        self.unfinished = {group.id: group for group in groups if not group.finished}
        self.ended = {group.id: group for group in groups if group.finished}

    @property
    def at_end(self) -> bool:
        return not (self.unfinished or self.ended)

    def note_end(self, group: RequestGroup) -> None:
        if self.unfinished.get(group.id) is group:
            self.ended[group.id] = self.unfinished.pop(group.id)

    def take(self) -> list[RequestGroup]:
        """Return the groups that have ended since the last call."""
        ended, self.ended = self.ended, {}
        return list(ended.values())

    def forget(self, id: str) -> None:
        self.unfinished.pop(id, None)
        self.ended.pop(id, None)

"""The `n` requests of a caller's prompt, the cursor of a stream over them, and a watcher of groups that
end."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...lora.request import LoRARequest
from ..engine.core.request import Request
from ..text.outputs import Delta


@dataclass(eq=False)
class RequestGroup:
    """`n` requests over one prompt, all with the group's id."""

    id: str
    prompt: str | None  # the text, if it was text
    requests: list[Request]
    lora_request: LoRARequest | None = None
    is_submitted: bool = False

    @classmethod
    def from_request_fields(cls, **fields: Any) -> "RequestGroup":
        """Make a group of one request with these fields. Its id is empty until the caller sets it."""
        return cls("", None, [Request(id="", **fields)])

    @property
    def is_finished(self) -> bool:
        return all(request.is_finished for request in self.requests)


class StreamCursor:
    """Cursor of a stream: how many tokens and pieces of text of each completion it has delivered. Completions
    that were delivered to their end are removed."""

    def __init__(self, group: RequestGroup):
        self._requests = dict(enumerate(group.requests))
        self._delivered: dict[int, tuple[int, int]] = dict.fromkeys(self._requests, (0, 0))

    @property
    def is_at_end(self) -> bool:
        return not self._requests

    def take(self) -> list[Delta]:
        """Return the deltas of all completions since the last call."""
        deltas = []
        for index, request in list(self._requests.items()):
            tokens, pieces = self._delivered[index]
            new = request.tokens[len(request.prompt) + tokens :]
            text, pieces = request.detokenizer.text_after(pieces) if request.detokenizer else ("", 0)
            if new or text or request.is_finished:
                deltas.append(Delta(index, text, new, request.finish_reason))
            self._delivered[index] = tokens + len(new), pieces
            if request.is_finished:
                del self._requests[index]
        return deltas


class CompletionWatcher:
    """Groups that a caller waits for.

    unfinished: groups that run, by id
    ended: groups that have ended and were not taken, by id, in the order of their ends
    """

    def __init__(self, groups: Sequence[RequestGroup]):
        self.unfinished = {group.id: group for group in groups if not group.is_finished}
        self.ended = {group.id: group for group in groups if group.is_finished}

    @property
    def is_at_end(self) -> bool:
        return not (self.unfinished or self.ended)

    def on_group_end(self, group: RequestGroup) -> None:
        if self.unfinished.get(group.id) is group:
            self.ended[group.id] = self.unfinished.pop(group.id)

    def take(self) -> list[RequestGroup]:
        """Return the groups that have ended since the last call."""
        ended, self.ended = self.ended, {}
        return list(ended.values())

    def forget(self, id: str) -> None:
        self.unfinished.pop(id, None)
        self.ended.pop(id, None)

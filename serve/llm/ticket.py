"""A user's request in the engine: `n` sequences over one prompt, and how far a stream has given them out."""

from dataclasses import dataclass

from ...lora.request import LoRARequest
from ..engine.core.request import Request
from ..text.outputs import Delta


@dataclass(eq=False)
class RequestGroup:
    """One call of the user: `n` requests over the same prompt."""

    id: str
    prompt: str | None
    requests: list[Request]
    lora_request: LoRARequest | None = None
    submitted: bool = False

    @property
    def place(self) -> int:
        """Its place among all tickets, in the order of their making."""
        return self.requests[0].arrival

    @property
    def finished(self) -> bool:
        return all(request.finished for request in self.requests)


class StreamCursor:
    """How many tokens and pieces of text of each of a ticket's completions were given out; those given to
    their end are gone."""

    def __init__(self, ticket: RequestGroup):
        self._requests = dict(enumerate(ticket.requests))
        self._places: dict[int, tuple[int, int]] = dict.fromkeys(self._requests, (0, 0))

    @property
    def at_end(self) -> bool:
        return not self._requests

    def take(self) -> list[Delta]:
        """What is new since the last call."""
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

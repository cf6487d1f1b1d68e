"""Answers of the API, whole or streamed, in one form that can be compared."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Choice:
    """A completion, or the message of a chat.

    text: all of it
    calls: names and arguments of tool calls; not their ids, which follow from the answer's
    reason: finish reason, None while it is generated
    tokens: ids of its tokens
    scores: log-probabilities of the tokens, if they were requested
    """

    text: str = ""
    calls: list[list[str]] = field(default_factory=list)
    reason: str | None = None
    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)

    def take(self, piece: Mapping[str, Any]) -> None:
        """Append a choice of an event, or of a whole answer."""
        message = piece.get("delta") or piece.get("message") or {}
        self.text += piece.get("text") or message.get("content") or ""
        for place, call in enumerate(message.get("tool_calls") or ()):
            self._take_call(call.get("index", place), call["function"])
        self.reason = piece.get("finish_reason") or self.reason
        self.tokens += piece.get("token_ids") or ()
        scores = piece.get("logprobs") or {}
        self.scores += scores.get("token_logprobs") or [one["logprob"] for one in scores.get("content") or ()]

    def _take_call(self, place: int, function: Mapping[str, str]) -> None:
        self.calls += [["", ""] for _ in range(place + 1 - len(self.calls))]
        call = self.calls[place]
        call[0] += function.get("name") or ""
        call[1] += function.get("arguments") or ""

    def begins(self, whole: "Choice") -> bool:
        """Return whether this is the beginning of a whole choice."""
        if self.reason is not None:
            return self == whole
        called = "".join(map("".join, self.calls))
        return (
            whole.text.startswith(self.text)
            and "".join(map("".join, whole.calls)).startswith(called)
            and whole.tokens[: len(self.tokens)] == self.tokens
            and whole.scores[: len(self.scores)] == self.scores
        )


@dataclass
class Answer:
    """The choices of an answer by their index."""

    choices: dict[int, Choice] = field(default_factory=dict)

    def take(self, event: Mapping[str, Any]) -> None:
        """Append the choices of an event, or of a whole answer."""
        for piece in event.get("choices", ()):
            self.choices.setdefault(piece["index"], Choice()).take(piece)

    def begins(self, whole: "Answer") -> bool:
        """Return whether a client that left early has read a beginning of a whole answer."""
        known = whole.choices
        return all(place in known and choice.begins(known[place]) for place, choice in self.choices.items())

    def record(self) -> list[dict[str, Any]]:
        """Return the choices for JSON, in their order."""
        return [asdict(self.choices[place]) for place in sorted(self.choices)]

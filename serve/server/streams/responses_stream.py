"""Answers of /v1/responses: whole, and as server-sent events."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...text.openai import responses
from ...text.openai.replies import Replies
from ...text.openai.responses import Response
from ...text.outputs import CompletionOutput, RequestOutput
from ...text.tools.reply_parser import Part, ReasoningDelta
from ...text.tools.stream_reader import TextDelta, ToolCallArguments, ToolCallStart
from .completion_request import CompletionRequest
from .completion_stream import ENCODER

THOUGHT, ANSWER, ARGUMENTS = "reasoning_text", "output_text", "function_call_arguments"
PREFIXES = {THOUGHT: "rs", ANSWER: "msg", ARGUMENTS: "fc"}  # of items' ids


def whole(
    replies: Replies, id: str, request: CompletionRequest, outputs: list[RequestOutput]
) -> dict[str, Any]:
    (result,) = outputs
    (output,) = result.outputs
    events = ResponseEvents(replies, id, request, result.prompt_token_ids)
    events.chunks([output])
    return events.ended(len(result.prompt_token_ids), result.num_cached_tokens)


@dataclass
class OutputItem:
    """An item of a response's output, with its text so far. `kind`: reasoning, answer, or the arguments of a
    call that has `begun`."""

    index: int
    id: str
    kind: str
    text: str = ""
    begun: ToolCallStart | None = None

    @property
    def is_answer(self) -> bool:
        return self.kind == ANSWER

    @property
    def place(self) -> dict[str, Any]:
        """The fields that locate its events: the item and, except for calls, its only part."""
        place = {"item_id": self.id, "output_index": self.index}
        return place if self.begun is not None else place | {"content_index": 0}

    @property
    def scores(self) -> dict[str, Any]:
        return {"logprobs": []} if self.is_answer else {}

    def record(self, status: str = "completed") -> dict[str, Any]:
        """Return its JSON; in progress it has no text yet."""
        if self.begun is not None:
            return responses.call(self.id, self.begun, self.text, status)
        text = None if status == "in_progress" else self.text
        if self.kind == THOUGHT:
            return responses.thought(self.id, text)
        return responses.message(self.id, text, status)


class ResponseEvents:
    """Writes the events of a response. Reasoning is an item before the answer, and each call is one."""

    def __init__(self, replies: Replies, id: str, request: CompletionRequest, prompt_ids: Sequence[int]):
        (task,) = request.tasks
        self._response = Response(id, request.created, replies.named(task), task, request.repeated)
        self._parser = replies.new_parser(task, prompt_ids, id)
        self._items: list[OutputItem] = []
        self._last: CompletionOutput | None = None
        self._tokens = self._thoughts = self._count = 0

    def begin(self) -> bytes:
        record = self._response.record("in_progress", [])
        return b"".join(self._event(name, response=record) for name in ("created", "in_progress"))

    def chunks(self, outputs: list[CompletionOutput]) -> bytes:
        return b"".join(event for output in outputs for event in self._taken(output))

    def end(self, prompt_tokens: int, cached_tokens: int) -> bytes:
        closed = b"".join(self._closed())
        record = self.ended(prompt_tokens, cached_tokens)
        return closed + self._event(record["status"], response=record)

    def ended(self, prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
        assert self._last is not None
        usage = responses.usage(prompt_tokens, cached_tokens, self._tokens, self._thoughts)
        return self._response.ended(self._last, [item.record() for item in self._items], usage)

    def skip(self, outputs: list[CompletionOutput], count: int) -> None:
        """Take outputs that another server has written as `count` events."""
        self.chunks(outputs)
        self._count = count

    def failed(self, error: dict[str, Any]) -> bytes:
        repeated = {name: error[name] for name in ("code", "message", "param")}
        return self._written("error", repeated)

    # ------------------------------------------------------------ items

    def _taken(self, output: CompletionOutput) -> Iterator[bytes]:
        self._last = output
        self._tokens += len(output.token_ids)
        parts = self._parser.take(output.text, at_end=output.finished())
        if parts and all(isinstance(part, ReasoningDelta) for part in parts):
            self._thoughts += len(output.token_ids)
        for part in parts:
            yield from self._events_of(part)
        if output.finished() and not any(item.kind in (ANSWER, ARGUMENTS) for item in self._items):
            yield from self._added(ANSWER, "")

    def _events_of(self, part: Part) -> Iterator[bytes]:
        if isinstance(part, ToolCallStart):
            yield from self._opened(ARGUMENTS, part)
        elif isinstance(part, ToolCallArguments):
            yield from self._added(ARGUMENTS, part.text)
        elif isinstance(part, TextDelta):
            yield from self._added(ANSWER, part.text)
        elif isinstance(part, ReasoningDelta) and self._response.task.reasoning:
            yield from self._added(THOUGHT, part.text)

    def _opened(self, kind: str, begun: ToolCallStart | None = None) -> Iterator[bytes]:
        yield from self._closed()
        same = sum(item.kind == kind for item in self._items)
        item = OutputItem(len(self._items), self._response.item_id(PREFIXES[kind], same), kind, begun=begun)
        self._items.append(item)
        yield self._event("output_item.added", output_index=item.index, item=item.record("in_progress"))
        if item.is_answer:
            yield self._event("content_part.added", **item.place, part=responses.text_part(""))

    def _added(self, kind: str, text: str) -> Iterator[bytes]:
        """Add text to an item of a kind, which begins with its first text."""
        if not self._items or self._items[-1].kind != kind:
            yield from self._opened(kind)
        item = self._items[-1]
        item.text += text
        if text:
            yield self._event(f"{kind}.delta", **item.place, delta=text, **item.scores)

    def _closed(self) -> Iterator[bytes]:
        """End the last item."""
        if not self._items:
            return
        item = self._items[-1]
        if item.begun is None:
            yield self._event(f"{item.kind}.done", **item.place, text=item.text, **item.scores)
        else:
            more = {"name": item.begun.name, "arguments": item.text}
            yield self._event(f"{item.kind}.done", **item.place, **more)
        if item.is_answer:
            yield self._event("content_part.done", **item.place, part=responses.text_part(item.text))
        yield self._event("output_item.done", output_index=item.index, item=item.record())

    # ------------------------------------------------------------ events

    def _event(self, name: str, /, **fields: Any) -> bytes:
        return self._written(f"response.{name}", fields)

    def _written(self, kind: str, fields: dict[str, Any]) -> bytes:
        record = {"type": kind, "sequence_number": self._count, **fields}
        self._count += 1
        return f"event: {kind}\ndata: ".encode() + ENCODER.encode(record) + b"\n\n"

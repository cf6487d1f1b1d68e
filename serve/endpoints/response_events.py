"""Answers of /v1/responses: whole, and as events of a stream."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..openai import responses
from ..openai.replies import Replies
from ..openai.responses import Response
from ..outputs import CompletionOutput, RequestOutput
from .answers import ENCODER
from .asked import Asked


def whole(replies: Replies, id: str, asked: Asked, outputs: list[RequestOutput]) -> dict[str, Any]:
    """The answer to a request."""
    (result,) = outputs
    (output,) = result.outputs
    events = ResponseEvents(replies, id, asked, result.prompt_token_ids)
    events.chunks([output])
    return events.ended(len(result.prompt_token_ids), result.num_cached_tokens)


@dataclass
class Item:
    """An item of a response's output, as its text comes; `kind` is that of its parts."""

    index: int
    kind: str
    text: str = ""

    @property
    def is_thought(self) -> bool:
        return self.kind == "reasoning_text"


class ResponseEvents:
    """Writes the events of a response; its reasoning is an item before its answer."""

    def __init__(self, replies: Replies, id: str, asked: Asked, prompt_ids: Sequence[int]):
        (task,) = asked.tasks
        self._response = Response(id, asked.created, replies.named(task), task, asked.told)
        self._reasoning = replies.reasoning(prompt_ids)
        self._items: list[Item] = []
        self._last: CompletionOutput | None = None
        self._tokens = self._thoughts = self._count = 0

    def begin(self) -> bytes:
        record = self._response.record("in_progress", [])
        return b"".join(self._event(name, response=record) for name in ("created", "in_progress"))

    def chunks(self, outputs: list[CompletionOutput]) -> bytes:
        """Events for what a step has brought."""
        return b"".join(event for output in outputs for event in self._taken(output))

    def end(self, prompt_tokens: int, cached_tokens: int) -> bytes:
        """The last events."""
        closed = b"".join(self._closed())
        record = self.ended(prompt_tokens, cached_tokens)
        return closed + self._event(record["status"], response=record)

    def ended(self, prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
        """The whole response."""
        assert self._last is not None
        usage = responses.usage(prompt_tokens, cached_tokens, self._tokens, self._thoughts)
        return self._response.ended(self._last, [self._record(item) for item in self._items], usage)

    def went_before(self, outputs: list[CompletionOutput], count: int) -> None:
        """Take note of what another server has written, in so many events."""
        self.chunks(outputs)
        self._count = count

    def failed(self, error: dict[str, Any]) -> bytes:
        """What a client is told of an error."""
        told = {name: error[name] for name in ("code", "message", "param")}
        return self._written("error", told)

    # ------------------------------------------------------------ items

    def _taken(self, output: CompletionOutput) -> Iterator[bytes]:
        self._last = output
        self._tokens += len(output.token_ids)
        thought, answer = "", output.text
        if self._reasoning is not None:
            thought, answer = self._reasoning.take(output.text, at_end=output.finished())
        if thought and not answer:
            self._thoughts += len(output.token_ids)
        if thought and self._response.task.reasoning:
            yield from self._added("reasoning_text", thought)
        if answer or (output.finished() and not any(item.kind == "output_text" for item in self._items)):
            yield from self._added("output_text", answer)

    def _added(self, kind: str, text: str) -> Iterator[bytes]:
        """More text of an item, which begins where it is the first."""
        if not self._items or self._items[-1].kind != kind:
            yield from self._closed()
            self._items.append(Item(len(self._items), kind))
            item = self._record(self._items[-1], "in_progress")
            yield self._event("output_item.added", output_index=len(self._items) - 1, item=item)
            if kind == "output_text":
                yield self._of_part("content_part.added", part=responses.text_part(""))
        item = self._items[-1]
        item.text += text
        more = {} if item.is_thought else {"logprobs": []}
        if text:
            yield self._of_part(f"{kind}.delta", delta=text, **more)

    def _closed(self) -> Iterator[bytes]:
        """The end of the last item."""
        if not self._items:
            return
        item = self._items[-1]
        more = {} if item.is_thought else {"logprobs": []}
        yield self._of_part(f"{item.kind}.done", text=item.text, **more)
        if not item.is_thought:
            yield self._of_part("content_part.done", part=responses.text_part(item.text))
        yield self._event("output_item.done", output_index=item.index, item=self._record(item))

    def _record(self, item: Item, status: str = "completed") -> dict[str, Any]:
        text = None if status == "in_progress" else item.text
        if item.is_thought:
            return self._response.thought(text)
        return self._response.message(text, status)

    # ------------------------------------------------------------ events

    def _of_part(self, name: str, **fields: Any) -> bytes:
        """An event of the last item's only part."""
        item = self._items[-1]
        id = self._response.item_id("rs" if item.is_thought else "msg")
        return self._event(name, item_id=id, output_index=item.index, content_index=0, **fields)

    def _event(self, name: str, **fields: Any) -> bytes:
        return self._written(f"response.{name}", fields)

    def _written(self, kind: str, fields: dict[str, Any]) -> bytes:
        record = {"type": kind, "sequence_number": self._count, **fields}
        self._count += 1
        return f"event: {kind}\ndata: ".encode() + ENCODER.encode(record) + b"\n\n"

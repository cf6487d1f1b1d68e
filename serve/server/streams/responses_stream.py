"""Answers to /v1/responses: whole, and as server-sent events."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...text.openai import responses
from ...text.openai.completion_request import CompletionRequest
from ...text.openai.replies import Replies
from ...text.openai.responses import ResponseRecord
from ...text.outputs import CompletionOutput, RequestOutput
from ...text.tools.reply_parser import ReasoningDelta, ReplyPart
from ...text.tools.stream_reader import TextDelta, ToolCallArguments, ToolCallStart
from .completion_stream import ENCODER

THOUGHT, ANSWER, ARGUMENTS = "reasoning_text", "output_text", "function_call_arguments"
ITEM_PREFIXES = {THOUGHT: "rs", ANSWER: "msg", ARGUMENTS: "fc"}  # of items' ids


def build_response(
    replies: Replies, id: str, request: CompletionRequest, outputs: list[RequestOutput]
) -> dict[str, Any]:
    (result,) = outputs
    (output,) = result.outputs
    events = ResponseEvents(replies, id, request, result.prompt_token_ids)
    events.encode_chunks([output])
    return events.final_record(len(result.prompt_token_ids), result.num_cached_tokens)


def make_response_events(
    replies: Replies, id: str, request: CompletionRequest, prompts: Sequence[Sequence[int]]
) -> "ResponseEvents":
    """Make the encoder of a stream. `prompts` has the token ids of the only prompt."""
    (prompt_ids,) = prompts
    return ResponseEvents(replies, id, request, prompt_ids)


@dataclass
class OutputItem:
    """An item of a response's output.

    index: position in the output
    kind: THOUGHT, ANSWER or ARGUMENTS
    text: text so far
    call_start: start of the tool call; None unless the kind is ARGUMENTS
    status: status at the end
    """

    index: int
    id: str
    kind: str
    text: str = ""
    call_start: ToolCallStart | None = None
    status: str = "completed"

    @property
    def is_answer(self) -> bool:
        return self.kind == ANSWER

    @property
    def location(self) -> dict[str, Any]:
        """Fields that locate its events: the item and, except for calls, its only part."""
        location = {"item_id": self.id, "output_index": self.index}
        return location if self.call_start is not None else location | {"content_index": 0}

    @property
    def scores(self) -> dict[str, Any]:
        return {"logprobs": []} if self.is_answer else {}

    def record(self, status: str | None = None) -> dict[str, Any]:
        """Return the item as an object for JSON. An item in progress has no text yet."""
        status = status or self.status
        if self.call_start is not None:
            return responses.call_item(self.id, self.call_start, self.text, status)
        text = None if status == "in_progress" else self.text
        if self.kind == THOUGHT:
            return responses.reasoning_item(self.id, text, status)
        return responses.message_item(self.id, text, status)


class ResponseEvents:
    """Encoder of the events of a response. Reasoning, the answer, and each tool call are items of its
    output."""

    def __init__(self, replies: Replies, id: str, request: CompletionRequest, prompt_ids: Sequence[int]):
        (task,) = request.tasks
        self._response = ResponseRecord(
            id, request.created, replies.model_name(task), task, request.repeated_fields
        )
        self._parser = replies.make_reply_parser(task, prompt_ids, id)
        self._items: list[OutputItem] = []
        self._last: CompletionOutput | None = None
        self._num_tokens = self._num_thought_tokens = self._num_events = 0

    def encode_start(self) -> bytes:
        record = self._response.to_json("in_progress", [])
        return b"".join(self._response_event(name, response=record) for name in ("created", "in_progress"))

    def encode_chunks(self, outputs: list[CompletionOutput]) -> bytes:
        return b"".join(event for output in outputs for event in self._output_events(output))

    def encode_end(self, prompt_tokens: int, cached_tokens: int) -> bytes:
        closing = b"".join(self._close_item())
        record = self.final_record(prompt_tokens, cached_tokens)
        return closing + self._response_event(record["status"], response=record)

    def final_record(self, prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
        assert self._last is not None
        usage = responses.response_usage(
            prompt_tokens, cached_tokens, self._num_tokens, self._num_thought_tokens
        )
        return self._response.final_json(self._last, [item.record() for item in self._items], usage)

    def skip_outputs(self, outputs: list[CompletionOutput], count: int) -> None:
        """Take outputs that another server has written as `count` events."""
        self.encode_chunks(outputs)
        self._num_events = count

    def encode_error(self, error: dict[str, Any]) -> bytes:
        fields = {name: error[name] for name in ("code", "message", "param")}
        return self._encode_event("error", fields)

    # ------------------------------------------------------------ items

    def _output_events(self, output: CompletionOutput) -> Iterator[bytes]:
        self._last = output
        self._num_tokens += len(output.token_ids)
        parts = self._parser.parse_chunk(output.text, at_end=output.finished())
        if parts and all(isinstance(part, ReasoningDelta) for part in parts):
            self._num_thought_tokens += len(output.token_ids)
        for part in parts:
            yield from self._part_events(part)
        if output.finished():
            yield from self._finish_items(output.finish_reason in responses.INCOMPLETE_DETAILS)

    def _finish_items(self, is_cut: bool) -> Iterator[bytes]:
        """Add an empty answer if there is none, and set the last item's status: incomplete if it was cut
        off."""
        has_answer = any(item.kind in (ANSWER, ARGUMENTS) for item in self._items)
        reasoning = self._parser.reasoning_parser
        is_thinking = bool(self._items) and reasoning is not None and reasoning.is_open
        if not (has_answer or (is_cut and is_thinking)):
            yield from self._add_text(ANSWER, "")
        self._items[-1].status = "incomplete" if is_cut else "completed"

    def _part_events(self, part: ReplyPart) -> Iterator[bytes]:
        if isinstance(part, ToolCallStart):
            yield from self._open_item(ARGUMENTS, part)
        elif isinstance(part, ToolCallArguments):
            yield from self._add_text(ARGUMENTS, part.text)
        elif isinstance(part, TextDelta):
            yield from self._add_text(ANSWER, part.text)
        elif isinstance(part, ReasoningDelta) and self._response.task.include_reasoning:
            yield from self._add_text(THOUGHT, part.text)

    def _open_item(self, kind: str, call_start: ToolCallStart | None = None) -> Iterator[bytes]:
        yield from self._close_item()
        num_same = sum(item.kind == kind for item in self._items)
        item = OutputItem(
            len(self._items),
            self._response.item_id(ITEM_PREFIXES[kind], num_same),
            kind,
            call_start=call_start,
        )
        self._items.append(item)
        yield self._response_event(
            "output_item.added", output_index=item.index, item=item.record("in_progress")
        )
        if item.is_answer:
            yield self._response_event(
                "content_part.added", **item.location, part=responses.text_part_json("")
            )

    def _add_text(self, kind: str, text: str) -> Iterator[bytes]:
        """Add text to the last item, or to a new one if the last is of another kind."""
        if not self._items or self._items[-1].kind != kind:
            yield from self._open_item(kind)
        item = self._items[-1]
        item.text += text
        if text:
            yield self._response_event(f"{kind}.delta", **item.location, delta=text, **item.scores)

    def _close_item(self) -> Iterator[bytes]:
        """End the last item, if there is one. Yields its events."""
        if not self._items:
            return
        item = self._items[-1]
        if item.call_start is None:
            yield self._response_event(f"{item.kind}.done", **item.location, text=item.text, **item.scores)
        else:
            more = {"name": item.call_start.name, "arguments": item.text}
            yield self._response_event(f"{item.kind}.done", **item.location, **more)
        if item.is_answer:
            yield self._response_event(
                "content_part.done", **item.location, part=responses.text_part_json(item.text)
            )
        yield self._response_event("output_item.done", output_index=item.index, item=item.record())

    # ------------------------------------------------------------ events

    def _response_event(self, name: str, /, **fields: Any) -> bytes:
        return self._encode_event(f"response.{name}", fields)

    def _encode_event(self, kind: str, fields: dict[str, Any]) -> bytes:
        record = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return f"event: {kind}\ndata: ".encode() + ENCODER.encode(record) + b"\n\n"

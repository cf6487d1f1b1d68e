"""Answers to completions and chats: whole, and as server-sent events."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec

from ...text.openai.completion_request import CompletionRequest
from ...text.openai.replies import ID_PREFIXES, Replies, token_usage
from ...text.openai.resume import encode_realm_comment, encode_tokens_comment
from ...text.openai.tasks import Task
from ...text.openai.text_offsets import TextOffsets, prompt_offsets
from ...text.outputs import CompletionOutput, RequestOutput
from ...text.tokenizer.tokenizer import Tokenizer
from ...text.tools.reply_parser import ReplyParser

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
TOKEN_COMMENT_SECONDS = 0.5  # seconds between comments on the tokens of a whole answer
ENCODER = msgspec.json.Encoder()


def encode_event(record: dict[str, Any]) -> bytes:
    return b"data: " + ENCODER.encode(record) + b"\n\n"


def build_completion(
    replies: Replies, id: str, request: CompletionRequest, outputs: list[RequestOutput]
) -> dict[str, Any]:
    """Return the whole answer to a request, as an object for JSON. `outputs` are the results of its
    prompts."""
    if request.is_echo_only:
        outputs = [
            replace(output, outputs=[drop_generated_token(completion) for completion in output.outputs])
            for output in outputs
        ]
    counts, cached = token_usage(*outputs), sum(output.num_cached_tokens for output in outputs)
    if request.echo:
        both = zip(outputs, request.tasks, strict=True)
        outputs = [output_with_prompt(replies, output, task) for output, task in both]
    reply = replies.reply_body(id, request.tasks[0], outputs, request.created, cached)
    return reply | {"usage": reply["usage"] | counts}


def drop_generated_token(output: CompletionOutput) -> CompletionOutput:
    """Return an output without its only token, which was generated for the scores of the prompt."""
    logprobs = None if output.logprobs is None else []
    return replace(output, text="", token_ids=[], logprobs=logprobs, finish_reason="length", stop_reason=None)


def output_with_prompt(replies: Replies, output: RequestOutput, task: Task) -> RequestOutput:
    """Return a result with the prompt before each continuation: text, token ids, and log-probabilities."""
    ids, scores, text = output.prompt_token_ids, output.prompt_logprobs, prompt_text(task, replies.tokenizer)
    offsets = None if scores is None else prompt_offsets(replies.tokenizer, text, ids)
    with_prompt = [
        replace(
            completion,
            text=text + completion.text,
            token_ids=[*ids, *completion.token_ids],
            logprobs=None
            if completion.logprobs is None or scores is None
            else [*scores, *completion.logprobs],
            text_offsets=offsets
            and offsets + replies.make_text_offsets(task, ids, len(text)).push(completion.token_ids),
        )
        for completion in output.outputs
    ]
    return replace(output, outputs=with_prompt)


def prompt_text(task: Task, tokenizer: Tokenizer | None) -> str:
    if isinstance(task.prompt, str):
        return task.prompt
    return "" if tokenizer is None else tokenizer.decode(task.prompt or [])


@dataclass
class CompletionEvents:
    """Encoder of the events of a stream.

    prompts: token ids of each prompt
    num_tokens: number of tokens generated so far
    """

    replies: Replies
    id: str
    request: CompletionRequest
    prompts: Sequence[Sequence[int]] = ((),)
    num_tokens: int = 0
    _parsers: dict[int, ReplyParser] = field(default_factory=dict)  # parsers of chat choices, by their index
    # text offsets, by the index of the choice
    _text_offsets: dict[int, TextOffsets] = field(default_factory=dict)

    def encode_start(self) -> bytes:
        """Return the first events: the prompts if they are echoed, else nothing."""
        if not self.request.echo:
            return b""
        n, tasks = self.first_task.params.n, self.request.tasks
        echoes = [
            CompletionOutput(i * n + j, prompt_text(task, self.replies.tokenizer), [])
            for i, task in enumerate(tasks)
            for j in range(n)
        ]
        return self.encode_chunks(echoes)

    @property
    def first_task(self) -> Task:
        return self.request.tasks[0]

    def encode_chunks(self, outputs: list[CompletionOutput]) -> bytes:
        before, after = self._frame
        pieces = [
            before + ENCODER.encode(choice) + after
            for output in outputs
            for choice in self._new_choices(output)
        ]
        return b"".join(pieces)

    def encode_end(self, prompt_tokens: int, cached_tokens: int) -> bytes:
        if not self.request.usage:
            return DONE
        counts = {"prompt_tokens": prompt_tokens, "completion_tokens": self.num_tokens}
        counts |= {"total_tokens": prompt_tokens + self.num_tokens}
        details = {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
        return encode_event(self._record | {"choices": [], "usage": counts | details}) + DONE

    def skip_outputs(self, outputs: list[CompletionOutput], count: int) -> None:
        """Take outputs that another server has written as `count` events."""
        self.encode_chunks(outputs)

    def encode_error(self, error: dict[str, Any]) -> bytes:
        return encode_event({"error": error})

    @cached_property
    def _frame(self) -> tuple[bytes, bytes]:
        """Bytes before and after a choice in each event."""
        usage = b',"usage":null' if self.request.usage else b""
        before = ENCODER.encode(self._record).removesuffix(b"}")
        return b"data: " + before + b',"choices":[', b"]" + usage + b"}\n\n"

    @cached_property
    def _record(self) -> dict[str, Any]:
        chat = self.first_task.form == "chat"
        return {
            "id": ID_PREFIXES[self.first_task.form] + self.id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": self.request.created,
            "model": self.replies.model_name(self.first_task),
        }

    def _new_choices(self, output: CompletionOutput) -> Iterator[dict[str, Any]]:
        if self.request.is_echo_only:
            output = drop_generated_token(output)
        self.num_tokens += len(output.token_ids)
        if self.first_task.form == "chat":
            if (index := output.index) not in self._parsers:
                parser = self.replies.make_reply_parser(self.first_task, self.prompts[0], self.id, index)
                self._parsers[index] = parser
                delta = {"role": "assistant", "content": ""}
                yield {"index": output.index, "delta": delta, "logprobs": None, "finish_reason": None}
            choice = self.replies.chat_delta(output, self.first_task, self._parsers[output.index])
            if choice["delta"] or choice["finish_reason"] or choice["logprobs"] or "token_ids" in choice:
                yield choice
        else:
            if self.first_task.params.logprobs is not None:
                output = replace(
                    output, text_offsets=self._choice_offsets(output.index).push(output.token_ids)
                )
            yield self.replies.completion_choice(output, self.first_task)

    def _choice_offsets(self, index: int) -> TextOffsets:
        if index not in self._text_offsets:
            prompt_ids = self.prompts[index // self.first_task.params.n]
            self._text_offsets[index] = self.replies.make_text_offsets(self.first_task, prompt_ids)
        return self._text_offsets[index]


class WholeEvent:
    """Encoder of a stream whose only event is the whole answer."""

    def __init__(self, answer: Callable[[], dict[str, Any]]):
        self._answer = answer

    def encode_start(self) -> bytes:
        return b""

    def encode_chunks(self, outputs: list[CompletionOutput]) -> bytes:
        return b""

    def encode_end(self, prompt_tokens: int, cached_tokens: int) -> bytes:
        return encode_event(self._answer())

    def skip_outputs(self, outputs: list[CompletionOutput], count: int) -> None:
        """Do nothing: the answer has all outputs."""

    def encode_error(self, error: dict[str, Any]) -> bytes:
        return encode_event({"error": error})


class TokenReporter:
    """Encoder of comments with the token ids of an answer that may be resumed.

    seconds: minimum seconds between comments; None writes none
    realm: returns the realm of the tokens, which is sent before the first tokens and after each change
    clock: returns seconds
    """

    def __init__(
        self, seconds: float | None, realm: Callable[[], str], clock: Callable[[], float] = time.monotonic
    ):
        self._seconds, self._clock, self._last = seconds, clock, clock()
        self._realm, self._sent_realm = realm, ""
        self._held: list[CompletionOutput] = []

    def __call__(self, outputs: list[CompletionOutput]) -> bytes:
        if self._seconds is None:
            return b""
        self._held += outputs
        now = self._clock()
        if now - self._last < self._seconds:
            return b""
        comment, self._held, self._last = encode_tokens_comment(self._held), [], now
        old_realm, self._sent_realm = self._sent_realm, self._realm()
        return comment if self._sent_realm == old_realm else encode_realm_comment(self._sent_realm) + comment

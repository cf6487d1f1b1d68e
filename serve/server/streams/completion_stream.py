"""Answers to completions and chats: whole, and as server-sent events."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec

from ...text.openai.replies import PREFIXES, Replies, usage
from ...text.openai.resume import realm_comment, tokens_comment
from ...text.openai.tasks import Task
from ...text.outputs import CompletionOutput, RequestOutput
from ...text.tokenizer.tokenizer import Tokenizer
from ...text.tools.reply_parser import ReplyParser
from .completion_request import CompletionRequest

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
SELDOM = 0.5  # seconds between comments on the tokens of a whole answer
ENCODER = msgspec.json.Encoder()


def event(record: dict[str, Any]) -> bytes:
    return b"data: " + ENCODER.encode(record) + b"\n\n"


def whole(
    replies: Replies, id: str, request: CompletionRequest, outputs: list[RequestOutput]
) -> dict[str, Any]:
    """Return the answer to a request, from the results of its prompts."""
    task, n = request.tasks[0], request.tasks[0].params.n
    if request.silent:
        outputs = [replace(out, outputs=[silenced(one) for one in out.outputs]) for out in outputs]
    counted = replace(
        outputs[0],
        prompt_token_ids=[i for out in outputs for i in out.prompt_token_ids],
        outputs=[one for out in outputs for one in out.outputs],
    )
    if request.echo:
        both = zip(outputs, request.tasks, strict=True)
        outputs = [echoed(out, prompt_text(task, replies.tokenizer)) for out, task in both]
    choices = [replace(one, index=i * n + one.index) for i, out in enumerate(outputs) for one in out.outputs]
    cached = sum(out.num_cached_tokens for out in outputs)
    reply = replies.body(id, task, replace(counted, outputs=choices), request.created, cached)
    if task.ids and task.form == "completion":  # of each choice those of its own prompt
        own = [out.prompt_token_ids for out in outputs for _ in range(n)]
        for choice, ids in zip(reply["choices"], own, strict=True):
            choice["prompt_token_ids"] = ids
    return reply | {"usage": reply["usage"] | usage(counted)}


def silenced(output: CompletionOutput) -> CompletionOutput:
    """Return an output without its token, which was generated only for the scores of the prompt."""
    logprobs = None if output.logprobs is None else []
    return replace(output, text="", token_ids=[], logprobs=logprobs, finish_reason="length", stop_reason=None)


def echoed(output: RequestOutput, text: str) -> RequestOutput:
    """Return a result with the prompt, which has this text, in front of each continuation."""
    ids, scores = output.prompt_token_ids, output.prompt_logprobs
    with_prompt = [
        replace(
            one,
            text=text + one.text,
            token_ids=[*ids, *one.token_ids],
            logprobs=None if one.logprobs is None or scores is None else [*scores, *one.logprobs],
        )
        for one in output.outputs
    ]
    return replace(output, outputs=with_prompt)


def prompt_text(task: Task, tokenizer: Tokenizer | None) -> str:
    if isinstance(task.prompt, str):
        return task.prompt
    return "" if tokenizer is None else tokenizer.decode(task.prompt or [])


@dataclass
class CompletionEvents:
    """Writes the events of a stream; `tokens` counts those generated so far."""

    replies: Replies
    id: str
    request: CompletionRequest
    prompt_ids: Sequence[int] = ()
    tokens: int = 0  # generated so far
    _begun: dict[int, ReplyParser] = field(default_factory=dict)  # choices
    _offsets: dict[int, int] = field(default_factory=dict)  # characters of each choice's tokens so far

    def begin(self) -> bytes:
        """Return the first events: the prompts, if they are echoed."""
        if not self.request.echo:
            return b""
        n, tasks = self.task.params.n, self.request.tasks
        echoes = [
            CompletionOutput(i * n + j, prompt_text(task, self.replies.tokenizer), [])
            for i, task in enumerate(tasks)
            for j in range(n)
        ]
        return self.chunks(echoes)

    @property
    def task(self) -> Task:
        return self.request.tasks[0]

    def chunks(self, outputs: list[CompletionOutput]) -> bytes:
        before, after = self._frame
        pieces = [before + ENCODER.encode(choice) + after for out in outputs for choice in self._choices(out)]
        return b"".join(pieces)

    def end(self, prompt_tokens: int, cached_tokens: int) -> bytes:
        if not self.request.usage:
            return DONE
        counts = {"prompt_tokens": prompt_tokens, "completion_tokens": self.tokens}
        counts |= {"total_tokens": prompt_tokens + self.tokens}
        details = {"prompt_tokens_details": {"cached_tokens": cached_tokens}}
        return event(self._record | {"choices": [], "usage": counts | details}) + DONE

    def skip(self, outputs: list[CompletionOutput], count: int) -> None:
        """Take outputs that another server has written as `count` events."""
        self.chunks(outputs)

    def failed(self, error: dict[str, Any]) -> bytes:
        return event({"error": error})

    @cached_property
    def _frame(self) -> tuple[bytes, bytes]:
        """The bytes before and after a choice in each event."""
        usage = b',"usage":null' if self.request.usage else b""
        before = ENCODER.encode(self._record).removesuffix(b"}")
        return b"data: " + before + b',"choices":[', b"]" + usage + b"}\n\n"

    @cached_property
    def _record(self) -> dict[str, Any]:
        chat = self.task.form == "chat"
        return {
            "id": PREFIXES[self.task.form] + self.id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": self.request.created,
            "model": self.replies.named(self.task),
        }

    def _choices(self, out: CompletionOutput) -> Iterator[dict[str, Any]]:
        if self.request.silent:
            out = silenced(out)
        self.tokens += len(out.token_ids)
        if self.task.form == "chat":
            if (index := out.index) not in self._begun:
                parser = self.replies.new_parser(self.task, self.prompt_ids, self.id, index)
                self._begun[index] = parser
                delta = {"role": "assistant", "content": ""}
                yield {"index": out.index, "delta": delta, "logprobs": None, "finish_reason": None}
            choice = self.replies.chat_delta(out, self.task, self._begun[out.index])
            if choice["delta"] or choice["finish_reason"] or choice["logprobs"] or "token_ids" in choice:
                yield choice
        else:
            offset = self._offsets.get(out.index, 0)
            choice = self.replies.completion_choice(out, self.task, offset)
            if choice["logprobs"] is not None:
                self._offsets[out.index] = offset + sum(map(len, choice["logprobs"]["tokens"]))
            yield choice


class WholeEvent:
    """Writes the whole answer as the only event of a stream."""

    def __init__(self, answer: Callable[[], dict[str, Any]]):
        self._answer = answer

    def begin(self) -> bytes:
        return b""

    def chunks(self, outputs: list[CompletionOutput]) -> bytes:
        return b""

    def end(self, prompt_tokens: int, cached_tokens: int) -> bytes:
        return event(self._answer())

    def skip(self, outputs: list[CompletionOutput], count: int) -> None:
        """Ignore them: the answer has all outputs."""

    def failed(self, error: dict[str, Any]) -> bytes:
        return event({"error": error})


class TokenReporter:
    """Writes comments with the token ids of an answer that may be resumed, at most one every `seconds`; None
    writes none. The `realm` of the tokens is sent before the first ones, and again after a change. `clock`
    returns seconds."""

    def __init__(
        self, seconds: float | None, realm: Callable[[], str], clock: Callable[[], float] = time.monotonic
    ):
        self._seconds, self._now, self._last = seconds, clock, clock()
        self._realm, self._named = realm, ""
        self._held: list[CompletionOutput] = []

    def __call__(self, outputs: list[CompletionOutput]) -> bytes:
        if self._seconds is None:
            return b""
        self._held += outputs
        now = self._now()
        if now - self._last < self._seconds:
            return b""
        found, self._held, self._last = tokens_comment(self._held), [], now
        before, self._named = self._named, self._realm()
        return found if self._named == before else realm_comment(self._named) + found

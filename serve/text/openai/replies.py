"""Replies in OpenAI's format: whole ones, and choices and log-probabilities for streams."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ....sampling.checks import ALL
from ..outputs import CompletionOutput, Logprob, RequestOutput
from ..tokenizer.tokenizer import Tokenizer
from ..tools.reply_parser import ReasoningDelta, ReplyParser, call_deltas, text_of, whole_calls
from ..tools.stream_reader import TextDelta
from ..tools.tool_parser import ToolParser
from .dialect import Dialect
from .tasks import Task

PREFIXES = {"chat": "chatcmpl-", "completion": "cmpl-"}  # of a reply's id, by what was asked for
Scores = dict[int, Logprob]  # of one position
LEAST_LOGPROB = -9999.0  # JSON has no infinity; vLLM's choice


@dataclass(frozen=True)
class Replies:
    """Makes replies of `model`, unless a request names another; `parser` names a format of calls other than
    the chat template's."""

    model: str
    tokenizer: Tokenizer | None = None
    parser: str | None = None

    def body(
        self, id: str, task: Task, output: RequestOutput, created: int = 0, cached: int = 0
    ) -> dict[str, Any]:
        """Return a whole reply. `created`: seconds since 1970; `cached`: tokens of the prompt found in the
        cache."""
        chat, ids = task.form == "chat", output.prompt_token_ids
        choices = [
            self.chat_choice(o, task, self.new_parser(task, ids, id, o.index))
            if chat
            else self.completion_choice(o, task)
            for o in output.outputs
        ]
        prompt_fields = {"prompt_token_ids": ids} if task.ids else {}
        return {
            "id": PREFIXES[task.form] + id,
            "object": "chat.completion" if chat else "text_completion",
            "created": created,
            "model": self.named(task),
            "choices": choices if chat else [choice | prompt_fields for choice in choices],
            "usage": {**usage(output), "prompt_tokens_details": {"cached_tokens": cached}},
            **(prompt_fields if chat else {}),
        }

    def named(self, task: Task) -> str:
        return self.model if task.model is None else task.model

    def ending(self, output: CompletionOutput, task: Task) -> dict[str, Any]:
        """Return the finish reason, and token ids if they are asked for or there is no text."""
        ending: dict[str, Any] = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        if task.ids and output.weights is not None:
            ending |= {"weights": output.weights}
        textless = self.tokenizer is None or not task.params.detokenize
        return {**ending, "token_ids": output.token_ids} if textless or task.ids else ending

    def completion_choice(self, output: CompletionOutput, task: Task, offset: int = 0) -> dict[str, Any]:
        """Return a choice, or a stream's addition to one whose tokens so far have `offset` characters."""
        logprobs = None
        if output.logprobs is not None:
            logprobs = self.completion_logprobs(output, output.logprobs, alternatives_of(task), offset)
        return {"index": output.index, "text": output.text, "logprobs": logprobs, **self.ending(output, task)}

    @cached_property
    def dialect(self) -> Dialect:
        return Dialect(self.tokenizer, self.parser)

    def new_parser(self, task: Task, prompt_ids: Sequence[int], id: str, index: int = 0) -> ReplyParser:
        """Return the parser of a choice of the reply with this id, to a prompt."""
        reasoning = self.dialect.reasoning(prompt_ids, task.params.structured_outputs is not None)
        tool_format, toolbox = self.dialect.tool_format, task.toolbox
        if toolbox is None or not toolbox.tools or tool_format is None:
            return ReplyParser("", reasoning)
        parser = ToolParser(tool_format, toolbox.tools, toolbox.is_several)
        return ReplyParser(f"{id} {index}", reasoning, parser, tool_format.has_short_ids)

    def chat_choice(self, output: CompletionOutput, task: Task, parser: ReplyParser) -> dict[str, Any]:
        parts = parser.take(output.text, at_end=True)
        calls, answer = whole_calls(parts), text_of(parts, TextDelta)
        message = {"role": "assistant", "content": None if calls and not answer else answer}
        message |= reasoned(text_of(parts, ReasoningDelta), task) | ({"tool_calls": calls} if calls else {})
        return {"index": output.index, "message": message, **self._chat_ending(output, task, parser)}

    def chat_delta(self, output: CompletionOutput, task: Task, parser: ReplyParser) -> dict[str, Any]:
        known = parser.count
        parts = parser.take(output.text, at_end=output.finished())
        calls, answer = call_deltas(parts, known), text_of(parts, TextDelta)
        delta = reasoned(text_of(parts, ReasoningDelta), task) | ({"content": answer} if answer else {})
        delta |= {"tool_calls": calls} if calls else {}
        return {"index": output.index, "delta": delta, **self._chat_ending(output, task, parser)}

    def _chat_ending(self, output: CompletionOutput, task: Task, parser: ReplyParser) -> dict[str, Any]:
        logprobs = None
        if output.logprobs is not None:
            logprobs = self.chat_logprobs(output, output.logprobs, alternatives_of(task))
        ending = {"logprobs": logprobs, **self.ending(output, task)}
        has_called = parser.count and output.finish_reason == "stop"
        return ending | ({"finish_reason": "tool_calls"} if has_called else {})

    def completion_logprobs(
        self, output: CompletionOutput, scores: Sequence[Scores | None], top: float, offset: int
    ) -> dict[str, Any]:
        """Return log-probabilities; those of a prompt's first token are None."""
        pairs = list(zip(output.token_ids, scores, strict=True))
        tokens = [self._token(i, None if found is None else found[i]) for i, found in pairs]
        offsets = list(itertools.accumulate(map(len, tokens), initial=offset))
        return {
            "tokens": tokens,
            "token_logprobs": [found and finite(found[i]) for i, found in pairs],
            "top_logprobs": [
                found and {self._token(i, p): finite(p) for i, p in likeliest(found, top)}
                for _, found in pairs
            ],
            "text_offset": offsets[:-1],
        }

    def chat_logprobs(self, output: CompletionOutput, scores: Sequence[Scores], top: float) -> dict:
        entries = []
        for token_id, found in zip(output.token_ids, scores, strict=True):
            others = [self._entry(i, p) for i, p in likeliest(found, top)]
            entries.append({**self._entry(token_id, found[token_id]), "top_logprobs": others})
        return {"content": entries}

    def _entry(self, token_id: int, score: Logprob) -> dict[str, Any]:
        data = list(self.tokenizer.token_bytes(token_id)) if self.tokenizer else None
        return {"token": self._token(token_id, score), "logprob": finite(score), "bytes": data}

    def _token(self, token_id: int, score: Logprob | None) -> str:
        """Return a token's text; without a tokenizer its id, as vLLM writes it."""
        if score is None and self.tokenizer is not None:
            return self.tokenizer.decode_token(token_id)
        text = None if score is None else score.decoded_token
        return f"token_id:{token_id}" if text is None else text


def reasoned(thought: str, task: Task) -> dict[str, Any]:
    """Return the reasoning of a message, if it is asked for, under vLLM's name and DeepSeek's."""
    return {"reasoning": thought, "reasoning_content": thought} if thought and task.reasoning else {}


def usage(output: RequestOutput) -> dict[str, int]:
    prompt, completion = len(output.prompt_token_ids), sum(len(o.token_ids) for o in output.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def alternatives_of(task: Task) -> float:
    top = task.params.logprobs or 0
    return math.inf if top == ALL else top


def likeliest(scores: dict[int, Logprob], top: float) -> list[tuple[int, Logprob]]:
    """Return the `top` likeliest tokens of a position, in order; the sampled one only if its rank is among
    these."""
    return sorted((e for e in scores.items() if e[1].rank <= top), key=lambda e: e[1].rank)


def alternatives(scores: dict[int, Logprob]) -> dict[str, dict[str, Any]]:
    """Return the log-probabilities of a position by token id."""
    return {
        str(i): {"logprob": finite(p), "rank": p.rank, "decoded_token": p.decoded_token}
        for i, p in scores.items()
    }


def finite(score: Logprob) -> float:
    return max(score.logprob, LEAST_LOGPROB)

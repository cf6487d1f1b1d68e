"""Replies in OpenAI's format: whole ones, and choices and log-probabilities for streams."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ....sampling.checks import ALL_LOGPROBS
from ..outputs import CompletionOutput, Logprob, RequestOutput
from ..tokenizer.tokenizer import Tokenizer
from ..tools.reply_parser import ReasoningDelta, ReplyParser, call_deltas, join_part_texts, list_whole_calls
from ..tools.stream_reader import TextDelta
from ..tools.tool_parser import ToolParser
from .dialect import Dialect
from .tasks import Task
from .text_offsets import TextOffsets

ID_PREFIXES = {"chat": "chatcmpl-", "completion": "cmpl-"}  # of a reply's id, by what was asked for
PositionLogprobs = dict[int, Logprob]  # of one position
MIN_LOGPROB = -9999.0  # JSON has no infinity; vLLM's choice


@dataclass(frozen=True)
class Replies:
    """Writer of replies in OpenAI's format.

    model: name of the model, unless a request gives another name
    tokenizer: None if replies have token ids alone
    parser_name: name of a format of tool calls; None: the format of the chat template
    """

    model: str
    tokenizer: Tokenizer | None = None
    parser_name: str | None = None

    def reply_body(
        self,
        id: str,
        task: Task,
        outputs: Sequence[RequestOutput],
        created: int = 0,
        num_cached_tokens: int = 0,
    ) -> dict[str, Any]:
        """Return a whole reply, to one prompt or several. `created`: seconds since 1970; `num_cached_tokens`:
        tokens of the prompts found in the cache."""
        is_chat = task.form == "chat"
        write_choices = self._chat_choices if is_chat else self._completion_choices
        choices = [choice for output in outputs for choice in write_choices(id, task, output)]
        return {
            "id": ID_PREFIXES[task.form] + id,
            "object": "chat.completion" if is_chat else "text_completion",
            "created": created,
            "model": self.model_name(task),
            "choices": [choice | {"index": i} for i, choice in enumerate(choices)],
            "usage": {**token_usage(*outputs), "prompt_tokens_details": {"cached_tokens": num_cached_tokens}},
            **(
                {"prompt_token_ids": outputs[0].prompt_token_ids} if is_chat and task.return_token_ids else {}
            ),
        }

    def _chat_choices(self, id: str, task: Task, output: RequestOutput) -> list[dict[str, Any]]:
        ids = output.prompt_token_ids
        return [
            self.chat_choice(completion, task, self.make_reply_parser(task, ids, id, completion.index))
            for completion in output.outputs
        ]

    def _completion_choices(self, id: str, task: Task, output: RequestOutput) -> list[dict[str, Any]]:
        ids = output.prompt_token_ids
        fields = {"prompt_token_ids": ids} if task.return_token_ids else {}
        located_outputs = [self.with_text_offsets(completion, task, ids) for completion in output.outputs]
        return [self.completion_choice(completion, task) | fields for completion in located_outputs]

    def model_name(self, task: Task) -> str:
        return self.model if task.model is None else task.model

    def ending_fields(self, output: CompletionOutput, task: Task) -> dict[str, Any]:
        """Return the finish reason, and token ids if they are asked for or there is no text."""
        ending: dict[str, Any] = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        if task.return_token_ids and output.weights is not None:
            ending |= {"weights": output.weights}
        has_no_text = self.tokenizer is None or not task.params.detokenize
        return {**ending, "token_ids": output.token_ids} if has_no_text or task.return_token_ids else ending

    def make_text_offsets(self, task: Task, prompt_ids: Sequence[int], start: int = 0) -> TextOffsets:
        """Return the offsets of a completion's tokens, to which `start` is added."""
        return TextOffsets(self.tokenizer, prompt_ids, task.params.skip_special_tokens, start)

    def with_text_offsets(
        self, output: CompletionOutput, task: Task, prompt_ids: Sequence[int]
    ) -> CompletionOutput:
        """Return a whole completion with the offsets of its tokens, if it reports these."""
        if output.logprobs is None or output.text_offsets is not None:
            return output
        return replace(output, text_offsets=self.make_text_offsets(task, prompt_ids).push(output.token_ids))

    def completion_choice(self, output: CompletionOutput, task: Task) -> dict[str, Any]:
        """Return a choice, or a stream's addition to one."""
        logprobs = None
        if output.logprobs is not None:
            logprobs = self.completion_logprobs(output, output.logprobs, task)
        return {
            "index": output.index,
            "text": output.text,
            "logprobs": logprobs,
            **self.ending_fields(output, task),
        }

    @cached_property
    def dialect(self) -> Dialect:
        return Dialect(self.tokenizer, self.parser_name)

    def make_reply_parser(
        self, task: Task, prompt_ids: Sequence[int], id: str, index: int = 0
    ) -> ReplyParser:
        """Return the parser of a choice of the reply with this id, to a prompt."""
        reasoning = self.dialect.make_reasoning_parser(prompt_ids, task.params.structured_outputs is not None)
        tool_format, toolbox = self.dialect.tool_format, task.toolbox
        if toolbox is None or not toolbox.tools or tool_format is None:
            return ReplyParser("", reasoning)
        if reasoning is not None:
            names = [tool.name for tool in toolbox.tools]
            reasoning = replace(reasoning, call_pattern=tool_format.compile_call_pattern(names))
        parser = ToolParser(tool_format, toolbox.tools, toolbox.allows_parallel_calls)
        return ReplyParser(f"{id} {index}", reasoning, parser, tool_format.has_short_ids)

    def chat_choice(self, output: CompletionOutput, task: Task, parser: ReplyParser) -> dict[str, Any]:
        parts = parser.parse_chunk(output.text, at_end=True)
        calls, answer = list_whole_calls(parts), join_part_texts(parts, TextDelta)
        message = {"role": "assistant", "content": None if calls and not answer else answer}
        message |= reasoning_fields(join_part_texts(parts, ReasoningDelta), task) | (
            {"tool_calls": calls} if calls else {}
        )
        return {"index": output.index, "message": message, **self._chat_ending_fields(output, task, parser)}

    def chat_delta(self, output: CompletionOutput, task: Task, parser: ReplyParser) -> dict[str, Any]:
        num_known = parser.num_calls
        parts = parser.parse_chunk(output.text, at_end=output.finished())
        calls, answer = call_deltas(parts, num_known), join_part_texts(parts, TextDelta)
        delta = reasoning_fields(join_part_texts(parts, ReasoningDelta), task) | (
            {"content": answer} if answer else {}
        )
        delta |= {"tool_calls": calls} if calls else {}
        return {"index": output.index, "delta": delta, **self._chat_ending_fields(output, task, parser)}

    def _chat_ending_fields(
        self, output: CompletionOutput, task: Task, parser: ReplyParser
    ) -> dict[str, Any]:
        logprobs = None
        if output.logprobs is not None:
            logprobs = self.chat_logprobs(output, output.logprobs, task)
        ending = {"logprobs": logprobs, **self.ending_fields(output, task)}
        has_called = parser.num_calls and output.finish_reason == "stop"
        return ending | ({"finish_reason": "tool_calls"} if has_called else {})

    def completion_logprobs(
        self, output: CompletionOutput, scores: Sequence[PositionLogprobs | None], task: Task
    ) -> dict[str, Any]:
        """Return log-probabilities in the form of completions. The first token of a prompt has None."""
        pairs = list(zip(output.token_ids, scores, strict=True))
        return {
            "tokens": [
                self._token_text(i, None if position_scores is None else position_scores[i], task)
                for i, position_scores in pairs
            ],
            "token_logprobs": [
                position_scores and finite_logprob(position_scores[i]) for i, position_scores in pairs
            ],
            "top_logprobs": [
                position_scores and self._top_logprobs(i, position_scores, task)
                for i, position_scores in pairs
            ],
            "text_offset": output.text_offsets,
        }

    def _top_logprobs(self, chosen: int, scores: PositionLogprobs, task: Task) -> dict[str, float]:
        """Return the log-probabilities of the likeliest tokens of a position, and of the chosen one, by text.

        If several tokens have the same text, the chosen one keeps the text as its name, or else the
        likeliest one. The others are named by their ids.
        """
        top = top_logprobs(scores, num_alternatives(task))
        top += [] if chosen in dict(top) else [(chosen, scores[chosen])]
        owners = {self._token_text(chosen, scores[chosen], task): chosen}
        for i, score in top:
            owners.setdefault(self._token_text(i, score, task), i)
        names = {i: name for name, i in owners.items()}
        return {names.get(i, token_id_name(i)): finite_logprob(score) for i, score in top}

    def chat_logprobs(
        self, output: CompletionOutput, scores: Sequence[PositionLogprobs], task: Task
    ) -> dict[str, Any]:
        entries = []
        for token_id, position_scores in zip(output.token_ids, scores, strict=True):
            others = [
                self._logprob_entry(i, p, task)
                for i, p in top_logprobs(position_scores, num_alternatives(task))
            ]
            entries.append(
                {**self._logprob_entry(token_id, position_scores[token_id], task), "top_logprobs": others}
            )
        return {"content": entries}

    def _logprob_entry(self, token_id: int, logprob: Logprob, task: Task) -> dict[str, Any]:
        data = list(self.tokenizer.token_bytes(token_id)) if self.tokenizer else None
        return {
            "token": self._token_text(token_id, logprob, task),
            "logprob": finite_logprob(logprob),
            "bytes": data,
        }

    def _token_text(self, token_id: int, logprob: Logprob | None, task: Task) -> str:
        """Return a token's text; its id without a tokenizer, or if ids are asked for."""
        if task.has_id_names:
            return token_id_name(token_id)
        if logprob is None and self.tokenizer is not None:
            return self.tokenizer.decode_token(token_id)
        text = None if logprob is None else logprob.decoded_token
        return token_id_name(token_id) if text is None else text


def token_id_name(token_id: int) -> str:
    """Return a token's id as vLLM writes it in place of a text."""
    return f"token_id:{token_id}"


def reasoning_fields(thought: str, task: Task) -> dict[str, Any]:
    """Return the reasoning of a message, if it is asked for, under vLLM's name and DeepSeek's."""
    return {"reasoning": thought, "reasoning_content": thought} if thought and task.include_reasoning else {}


def token_usage(*outputs: RequestOutput) -> dict[str, int]:
    """Return the counts of tokens of one prompt or several, with their completions."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    completion = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def num_alternatives(task: Task) -> float:
    top = task.params.logprobs or 0
    return math.inf if top == ALL_LOGPROBS else top


def top_logprobs(scores: dict[int, Logprob], top: float) -> list[tuple[int, Logprob]]:
    """Return the `top` likeliest tokens of a position, in order; the sampled one only if its rank is among
    these."""
    return sorted((e for e in scores.items() if e[1].rank <= top), key=lambda e: e[1].rank)


def logprobs_by_id(scores: dict[int, Logprob]) -> dict[str, dict[str, Any]]:
    """Return the log-probabilities of a position by token id."""
    return {
        str(i): {"logprob": finite_logprob(p), "rank": p.rank, "decoded_token": p.decoded_token}
        for i, p in scores.items()
    }


def finite_logprob(logprob: Logprob) -> float:
    return max(logprob.logprob, MIN_LOGPROB)

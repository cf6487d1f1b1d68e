"""Answers of a batch: one line of JSON for each line asked, in its format.

Nothing in an answer depends on when, how fast or beside whom it was computed: no clock (`created` is 0), no
latencies, and no count of cached tokens, which is 0 where OpenAI's format has one. So a job that was
interrupted ends with the same bytes as one that was not. Errors are in the answer's body, as OpenAI's servers
send them, and in `error`, where vLLM has them.
"""

import hashlib
import itertools
import math
from dataclasses import dataclass
from typing import Any

import msgspec

from ...sampling.checks import ALL
from ..outputs import CompletionOutput, Logprob, RequestOutput
from ..text.tokenizer import Tokenizer
from .lines import INTERNAL, Address, LineError, Task, encodable

LEAST_LOGPROB = -9999.0  # JSON has no infinity; vLLM's choice
# Characters that end a line for some readers, though not for JSON: inside strings they may be escapes.
LINE_ENDS = {c.encode(): b"\\u%04x" % ord(c) for c in ("\u0085", "\u2028", "\u2029")}


@dataclass(frozen=True)
class Answers:
    """Writes the answers of one job: `salt` (the input's hash) and a line's number name an answer, `model`
    the model for lines that do not."""

    salt: str
    model: str
    tokenizer: Tokenizer | None = None

    def result(self, number: int, task: Task, output: RequestOutput) -> bytes:
        """The answer to a task that was run."""
        if task.form == "plain":
            return encoded(self._plain(number, task, output))
        body = self._body(number, task, output)
        response = {"status_code": 200, "request_id": self._name("req_", number), "body": body}
        return encoded(self._envelope(number, task.id, response, None))

    def error(self, number: int, address: Address, error: LineError) -> bytes:
        """The answer to a line that cannot be run."""
        told = {"code": error.code, "message": encodable(str(error))}
        if not address.openai:
            name = {} if address.id is None else {"id": address.id}
            return encoded({**name, "line": number, "error": told})
        internal = error.code == INTERNAL
        kind = "server_error" if internal else "invalid_request_error"
        body = {"error": {**told, "type": kind, "param": None}}
        response = {
            "status_code": 500 if internal else 400,
            "request_id": self._name("req_", number),
            "body": body,
        }
        return encoded(self._envelope(number, address.id, response, {**told, "line": number}))

    def _envelope(self, number: int, custom_id: Any, response: dict, error: dict | None) -> dict[str, Any]:
        name = self._name("batch_req_", number)
        return {"id": name, "custom_id": custom_id, "response": response, "error": error}

    def _name(self, prefix: str, number: int) -> str:
        return prefix + hashlib.sha256(f"{self.salt} {number}".encode()).hexdigest()[:24]

    def _plain(self, number: int, task: Task, output: RequestOutput) -> dict[str, Any]:
        name = {} if task.id is None else {"id": task.id}
        choices = [self._plain_choice(o, task) for o in output.outputs]
        said = choices[0] if len(choices) == 1 else {"choices": choices}
        prompt = output.prompt_logprobs
        scores = {} if prompt is None else {"prompt_logprobs": [p and alternatives(p) for p in prompt]}
        return {**name, "line": number, **without(said, "index"), "usage": usage(output), **scores}

    def _plain_choice(self, output: CompletionOutput, task: Task) -> dict[str, Any]:
        choice = {"index": output.index, "text": output.text, **self._ending(output, task)}
        if output.logprobs is None:
            return choice
        return {
            **choice,
            "token_ids": output.token_ids,
            "logprobs": [alternatives(p) for p in output.logprobs],
        }

    def _ending(self, output: CompletionOutput, task: Task) -> dict[str, Any]:
        """Why the output ended; token ids where there is no text."""
        ending = {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
        textless = self.tokenizer is None or not task.params.detokenize
        return {**ending, "token_ids": output.token_ids} if textless else ending

    def _body(self, number: int, task: Task, output: RequestOutput) -> dict[str, Any]:
        chat = task.form == "chat"
        choice = self._chat_choice if chat else self._completion_choice
        return {
            "id": self._name("chatcmpl-" if chat else "cmpl-", number),
            "object": "chat.completion" if chat else "text_completion",
            "created": 0,
            "model": self.model if task.model is None else task.model,
            "choices": [choice(o, task) for o in output.outputs],
            "usage": {**usage(output), "prompt_tokens_details": {"cached_tokens": 0}},
        }

    def _completion_choice(self, output: CompletionOutput, task: Task) -> dict[str, Any]:
        logprobs = None
        if output.logprobs is not None:
            logprobs = self._completion_logprobs(output, output.logprobs, alternatives_of(task))
        return {
            "index": output.index,
            "text": output.text,
            "logprobs": logprobs,
            **self._ending(output, task),
        }

    def _chat_choice(self, output: CompletionOutput, task: Task) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text}
        logprobs = None
        if output.logprobs is not None:
            logprobs = self._chat_logprobs(output, output.logprobs, alternatives_of(task))
        return {"index": output.index, "message": message, "logprobs": logprobs, **self._ending(output, task)}

    def _completion_logprobs(
        self, output: CompletionOutput, scores: list[dict[int, Logprob]], top: float
    ) -> dict:
        tokens = [self._token(i, s[i]) for i, s in zip(output.token_ids, scores, strict=True)]
        offsets = [0, *itertools.accumulate(len(t) for t in tokens)]
        return {
            "tokens": tokens,
            "token_logprobs": [finite(s[i]) for i, s in zip(output.token_ids, scores, strict=True)],
            "top_logprobs": [{self._token(i, p): finite(p) for i, p in likeliest(s, top)} for s in scores],
            "text_offset": offsets[:-1],
        }

    def _chat_logprobs(self, output: CompletionOutput, scores: list[dict[int, Logprob]], top: float) -> dict:
        entries = []
        for token_id, found in zip(output.token_ids, scores, strict=True):
            others = [self._entry(i, p) for i, p in likeliest(found, top)]
            entries.append({**self._entry(token_id, found[token_id]), "top_logprobs": others})
        return {"content": entries}

    def _entry(self, token_id: int, score: Logprob) -> dict[str, Any]:
        data = list(self.tokenizer.token_bytes(token_id)) if self.tokenizer else None
        return {"token": self._token(token_id, score), "logprob": finite(score), "bytes": data}

    def _token(self, token_id: int, score: Logprob) -> str:
        """A token's text; without a tokenizer its id, as vLLM writes it."""
        return f"token_id:{token_id}" if score.decoded_token is None else score.decoded_token


def usage(output: RequestOutput) -> dict[str, int]:
    prompt, completion = len(output.prompt_token_ids), sum(len(o.token_ids) for o in output.outputs)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def alternatives_of(task: Task) -> float:
    """How many of the likeliest tokens a task wants to see."""
    asked = task.params.logprobs or 0
    return math.inf if asked == ALL else asked


def likeliest(scores: dict[int, Logprob], top: float) -> list[tuple[int, Logprob]]:
    """The `top` likeliest tokens of a position, in order; the sampled one is only among them by its rank."""
    return sorted((e for e in scores.items() if e[1].rank <= top), key=lambda e: e[1].rank)


def alternatives(scores: dict[int, Logprob]) -> dict[str, dict[str, Any]]:
    """One position's log-probabilities by token id."""
    return {
        str(i): {"logprob": finite(p), "rank": p.rank, "decoded_token": p.decoded_token}
        for i, p in scores.items()
    }


def finite(score: Logprob) -> float:
    return max(score.logprob, LEAST_LOGPROB)


def without(record: dict[str, Any], name: str) -> dict[str, Any]:
    return {k: v for k, v in record.items() if k != name}


def encoded(record: dict[str, Any]) -> bytes:
    """Compact JSON without anything that could be taken for the end of the line."""
    data = msgspec.json.encode(record)
    for character, escape in LINE_ENDS.items():
        data = data.replace(character, escape)
    return data

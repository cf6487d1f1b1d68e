"""Answers of a batch job: one line of JSON for each input line, in its format.

An answer does not depend on time, speed or other requests: `created` is 0, there are no latencies, and the
count of cached tokens in OpenAI's format is 0. So an interrupted job ends with the same bytes as any other.
Errors are in the answer's body, as OpenAI's servers send them, and in `error`, as in vLLM's output.
"""

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec

from ...text.openai.errors import RequestError, escape_surrogates
from ...text.openai.replies import Replies, logprobs_by_id, token_usage
from ...text.openai.tasks import Task
from ...text.outputs import CompletionOutput, GenerationError, RequestOutput
from ...text.tokenizer.tokenizer import Tokenizer
from .lines import INTERNAL_ERROR, LineIdentity

# Characters that end a line for some readers, though not for JSON: inside strings they may be escapes.
LINE_ENDS = {c.encode(): b"\\u%04x" % ord(c) for c in ("\u0085", "\u2028", "\u2029")}


@dataclass(frozen=True)
class AnswerFormatter:
    """Writer of one job's answers. An answer's id is a hash of `salt` and of its line's number.

    salt: hash of the input
    model: model name in answers to lines that name none
    tokenizer: of the model; None if it has none
    parser: name of the notation of tool calls; None for the chat template's
    """

    salt: str
    model: str
    tokenizer: Tokenizer | None = None
    parser: str | None = None

    @cached_property
    def replies(self) -> Replies:
        return Replies(self.model, self.tokenizer, self.parser)

    def format_result(self, number: int, task: Task, output: RequestOutput) -> bytes:
        """Return the answer to the finished task of line `number`, as JSON."""
        if task.form == "plain":
            return encode_answer(self._plain_record(number, task, output))
        body = self.replies.reply_body(self._answer_id("", number), task, [output])
        response = {"status_code": 200, "request_id": self._answer_id("req_", number), "body": body}
        return encode_answer(self._envelope(number, task.id, response, None))

    def format_error(self, number: int, identity: LineIdentity, error: RequestError) -> bytes:
        """Return the answer to line `number`, which cannot be run, as JSON."""
        fields = {"code": error.code, "message": escape_surrogates(str(error))}
        if not identity.is_openai:
            name = {} if identity.id is None else {"id": identity.id}
            return encode_answer({**name, "line": number, "error": fields})
        internal = error.code in (INTERNAL_ERROR, GenerationError.CODE)
        kind = "server_error" if internal else "invalid_request_error"
        body = {"error": {**fields, "type": kind, "param": None}}
        response = {
            "status_code": 500 if internal else 400,
            "request_id": self._answer_id("req_", number),
            "body": body,
        }
        return encode_answer(self._envelope(number, identity.id, response, {**fields, "line": number}))

    def _envelope(self, number: int, custom_id: Any, response: dict, error: dict | None) -> dict[str, Any]:
        name = self._answer_id("batch_req_", number)
        return {"id": name, "custom_id": custom_id, "response": response, "error": error}

    def _answer_id(self, prefix: str, number: int) -> str:
        return prefix + hashlib.sha256(f"{self.salt} {number}".encode()).hexdigest()[:24]

    def _plain_record(self, number: int, task: Task, output: RequestOutput) -> dict[str, Any]:
        name = {} if task.id is None else {"id": task.id}
        choices = [self._plain_choice(o, task) for o in output.outputs]
        content = choices[0] if len(choices) == 1 else {"choices": choices}
        prompt = output.prompt_logprobs
        scores = {} if prompt is None else {"prompt_logprobs": [p and logprobs_by_id(p) for p in prompt]}
        content.pop("index", None)
        return {**name, "line": number, **content, "usage": token_usage(output), **scores}

    def _plain_choice(self, output: CompletionOutput, task: Task) -> dict[str, Any]:
        choice = {"index": output.index, "text": output.text, **self.replies.ending_fields(output, task)}
        if output.logprobs is None:
            return choice
        return choice | {
            "token_ids": output.token_ids,
            "logprobs": [logprobs_by_id(p) for p in output.logprobs],
        }


def encode_answer(record: dict[str, Any]) -> bytes:
    """Return compact JSON. Characters that some readers take for the end of a line are escaped."""
    data = msgspec.json.encode(record)
    for character, escape in LINE_ENDS.items():
        data = data.replace(character, escape)
    return data

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

from ...text.openai.errors import RequestError, encodable
from ...text.openai.replies import Replies, alternatives, usage
from ...text.openai.tasks import Task
from ...text.outputs import CompletionOutput, RequestOutput
from ...text.tokenizer.tokenizer import Tokenizer
from .lines import INTERNAL, Address

# Characters that end a line for some readers, though not for JSON: inside strings they may be escapes.
LINE_ENDS = {c.encode(): b"\\u%04x" % ord(c) for c in ("\u0085", "\u2028", "\u2029")}


@dataclass(frozen=True)
class Answers:
    """Writer of one job's answers. An answer's id is a hash of `salt` (the input's hash) and its line's
    number. `model` is the name for lines without one, `parser` the notation of tool calls."""

    salt: str
    model: str
    tokenizer: Tokenizer | None = None
    parser: str | None = None

    @cached_property
    def replies(self) -> Replies:
        return Replies(self.model, self.tokenizer, self.parser)

    def result(self, number: int, task: Task, output: RequestOutput) -> bytes:
        """Return the answer to a finished task."""
        if task.form == "plain":
            return encoded(self._plain(number, task, output))
        body = self.replies.body(self._name("", number), task, output)
        response = {"status_code": 200, "request_id": self._name("req_", number), "body": body}
        return encoded(self._envelope(number, task.id, response, None))

    def error(self, number: int, address: Address, error: RequestError) -> bytes:
        """Return the answer to a line that cannot be run."""
        fields = {"code": error.code, "message": encodable(str(error))}
        if not address.openai:
            name = {} if address.id is None else {"id": address.id}
            return encoded({**name, "line": number, "error": fields})
        internal = error.code == INTERNAL
        kind = "server_error" if internal else "invalid_request_error"
        body = {"error": {**fields, "type": kind, "param": None}}
        response = {
            "status_code": 500 if internal else 400,
            "request_id": self._name("req_", number),
            "body": body,
        }
        return encoded(self._envelope(number, address.id, response, {**fields, "line": number}))

    def _envelope(self, number: int, custom_id: Any, response: dict, error: dict | None) -> dict[str, Any]:
        name = self._name("batch_req_", number)
        return {"id": name, "custom_id": custom_id, "response": response, "error": error}

    def _name(self, prefix: str, number: int) -> str:
        return prefix + hashlib.sha256(f"{self.salt} {number}".encode()).hexdigest()[:24]

    def _plain(self, number: int, task: Task, output: RequestOutput) -> dict[str, Any]:
        name = {} if task.id is None else {"id": task.id}
        choices = [self._plain_choice(o, task) for o in output.outputs]
        content = choices[0] if len(choices) == 1 else {"choices": choices}
        prompt = output.prompt_logprobs
        scores = {} if prompt is None else {"prompt_logprobs": [p and alternatives(p) for p in prompt]}
        content.pop("index", None)
        return {**name, "line": number, **content, "usage": usage(output), **scores}

    def _plain_choice(self, output: CompletionOutput, task: Task) -> dict[str, Any]:
        choice = {"index": output.index, "text": output.text, **self.replies.ending(output, task)}
        if output.logprobs is None:
            return choice
        return choice | {
            "token_ids": output.token_ids,
            "logprobs": [alternatives(p) for p in output.logprobs],
        }


def encoded(record: dict[str, Any]) -> bytes:
    """Return compact JSON without characters that some readers take for the end of a line."""
    data = msgspec.json.encode(record)
    for character, escape in LINE_ENDS.items():
        data = data.replace(character, escape)
    return data

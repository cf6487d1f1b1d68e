"""Resuming an answer on another server (failover), from the tokens so far. The tokens of a request depend on
its prompt, parameters and seed alone, and the text on its tokens. So a server that gets the first tokens
generates the rest, and writes what the first server would have written."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import msgspec
import numpy as np

from ..outputs import CompletionOutput
from .errors import RequestError, require_field
from .tasks import Task

STREAM_END = b": end\n\n"  # comment after a stream's last event
MAX_RESUME_COUNT = 1 << 32  # events of an answer, and seconds since 1970


@dataclass(frozen=True)
class ResumeState:
    """A resumable answer.

    id: 32 hexadecimal digits; seeds that are not given are drawn from it
    created: seconds since 1970, which chat templates see as the time
    outputs: token ids of each choice so far
    events: number of events that reported them
    realm: name of the weights that they follow from; without it the client vouches for these
    """

    id: str
    created: int
    outputs: tuple[tuple[int, ...], ...] = ()
    events: int = 0
    realm: str | None = None

    def __post_init__(self):
        digits = set(self.id) <= set("0123456789abcdef")
        require_field(digits and len(self.id) == 32, "resume", self.id, "an id of 32 hexadecimal digits")
        require_field(0 <= self.created < MAX_RESUME_COUNT, "resume", self.created, "seconds since 1970")
        require_field(
            0 <= self.events < MAX_RESUME_COUNT, "resume", self.events, f"0 to {MAX_RESUME_COUNT - 1} events"
        )

    @property
    def has_begun(self) -> bool:
        return any(self.outputs)

    def resume_tasks(self, tasks: Sequence[Task]) -> list[Task]:
        """Return the tasks with the seed, time and tokens of the answer so far. Raises RequestError for
        tokens of more choices than the tasks have."""
        n = tasks[0].params.n
        allowed = f"tokens of at most {len(tasks) * n} choices"
        require_field(len(self.outputs) <= len(tasks) * n, "resume", list(self.outputs), allowed)
        return [self._resume_task(task, i, self.outputs[i * n : (i + 1) * n]) for i, task in enumerate(tasks)]

    def _resume_task(self, task: Task, i: int, known: tuple[tuple[int, ...], ...]) -> Task:
        params = task.params
        if params.seed is None:
            seeds = np.random.SeedSequence([int(self.id, 16), i]).generate_state(1, np.uint64)
            params = replace(params, seed=int(seeds[0] >> np.uint64(1)))
        return replace(task, params=params, now=datetime.fromtimestamp(self.created), resumed_outputs=known)


def parse_resume(value: Any) -> ResumeState | None:
    """Parse the field `resume` of a body. Raises RequestError."""
    if value is None:
        return None
    try:
        return msgspec.convert(value, ResumeState)
    except msgspec.ValidationError as error:
        raise RequestError("invalid_request", f"resume is not allowed: {error}", "resume") from None


def encode_realm_comment(realm: str) -> bytes:
    """Return a comment of a stream that names the realm of the next tokens."""
    return f": realm {realm}\n\n".encode()


def encode_tokens_comment(outputs: Sequence[CompletionOutput]) -> bytes:
    """Return a comment behind events of a stream, with the token ids of each choice that they came from."""
    ids: dict[str, list[int]] = {}
    for output in outputs:
        ids.setdefault(str(output.index), []).extend(output.token_ids)
    return b": tokens " + msgspec.json.encode(ids) + b"\n\n"

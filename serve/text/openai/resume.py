"""Answers that go on elsewhere: one that has ended too early is asked for again, from the tokens that came.

The tokens of a request depend on its prompt, its parameters and its seed alone, and the text on its tokens.
So another server that is told the first ones gives the rest, and writes what this one would have written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import msgspec
import numpy as np

from ..outputs import CompletionOutput
from .errors import RequestError, require
from .tasks import Task

END = b": end\n\n"  # behind a stream's last event
MOST = 1 << 32  # events of an answer, and seconds since 1970


@dataclass(frozen=True)
class Resume:
    """Of an answer that can be resumed: its id (32 hexadecimal digits), its time in seconds, and the token
    ids of each choice so far, which were told in so many events. `realm` names what they follow from; without
    it the client answers for that.

    The time is also what chat templates see; seeds that are not given are drawn from the id.
    """

    id: str
    created: int
    outputs: tuple[tuple[int, ...], ...] = ()
    events: int = 0
    realm: str | None = None

    def __post_init__(self):
        digits = set(self.id) <= set("0123456789abcdef")
        require(digits and len(self.id) == 32, "resume", self.id, "an id of 32 hexadecimal digits")
        require(0 <= self.created < MOST, "resume", self.created, "seconds since 1970")
        require(0 <= self.events < MOST, "resume", self.events, f"0 to {MOST - 1} events")

    @property
    def has_begun(self) -> bool:
        return any(self.outputs)

    def tasks(self, tasks: Sequence[Task]) -> list[Task]:
        """The tasks of an answer with what was decided when it began. Raises RequestError for tokens of more
        choices than they have."""
        n = tasks[0].params.n
        most = f"tokens of at most {len(tasks) * n} choices"
        require(len(self.outputs) <= len(tasks) * n, "resume", list(self.outputs), most)
        return [self._task(task, i, self.outputs[i * n : (i + 1) * n]) for i, task in enumerate(tasks)]

    def _task(self, task: Task, i: int, known: tuple[tuple[int, ...], ...]) -> Task:
        params = task.params
        if params.seed is None:
            drawn = np.random.SeedSequence([int(self.id, 16), i]).generate_state(1, np.uint64)
            params = replace(params, seed=int(drawn[0] >> np.uint64(1)))
        return replace(task, params=params, now=datetime.fromtimestamp(self.created), known=known)


def resume_of(value: Any) -> Resume | None:
    """What the field `resume` of a body says. Raises RequestError."""
    if value is None:
        return None
    try:
        return msgspec.convert(value, Resume)
    except msgspec.ValidationError as error:
        raise RequestError("invalid_request", f"resume is not allowed: {error}", "resume") from None


def realm_comment(realm: str) -> bytes:
    """A comment before tokens of a stream: what these and the next ones follow from."""
    return f": realm {realm}\n\n".encode()


def tokens_comment(outputs: Sequence[CompletionOutput]) -> bytes:
    """A comment behind events of a stream: the token ids of each choice that they came from."""
    ids: dict[str, list[int]] = {}
    for output in outputs:
        ids.setdefault(str(output.index), []).extend(output.token_ids)
    return b": tokens " + msgspec.json.encode(ids) + b"\n\n"

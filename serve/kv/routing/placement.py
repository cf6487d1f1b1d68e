"""Placement of prompts: the load of each replica, and the best replica for a prompt."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from .prefix_index import PrefixIndex

ROW = 32  # tokens of prefill that a request which generates is reckoned as


@dataclass(frozen=True)
class Prompt:
    """The names of a prompt's full pages of `page` tokens each, and how many tokens it has, or about has."""

    names: Sequence[bytes] = ()
    page: int = 1
    tokens: int = 0


class ReplicaConnection(Protocol):
    """A request's way to its replica."""

    def abort(self) -> None: ...


@dataclass(eq=False)
class RoutedRequest:
    """A request on its way: its prompt, and of the replica that has it how many tokens of the prompt that has
    to compute, until its answer has begun. `left` are replicas that could not serve it, `others` those of
    them whose realm is not the one of the answer so far, `realm`."""

    prompt: Prompt
    work: int = 0
    has_begun: bool = False
    left: set["Replica"] = field(default_factory=set)
    others: set["Replica"] = field(default_factory=set)
    realm: str = ""

    def refused_by(self, replica: "Replica") -> None:
        """A replica has other weights, or other versions, than the answer began with."""
        self.left.add(replica)
        self.others.add(replica)

    def begin_anew(self) -> None:
        """Nothing of its answer is left that a replica would have to go on with."""
        self.left -= self.others
        self.others.clear()
        self.realm = ""


class Replica:
    """A server at an address: whether it is there and takes requests, and those that it has."""

    def __init__(self, address: str, memory: PrefixIndex, row: int = ROW):
        self.address, self.memory, self._row = address, memory, row
        self.is_up = self.is_ready = False  # before the first look
        self.realm = ""  # of its answers, as far as it is known
        self.jobs: set[RoutedRequest] = set()
        self.connections: set[ReplicaConnection] = set()
        self.chosen = self.prompt_tokens = self.hit_tokens = self.lost = 0
        self._work = 0  # of jobs that have not begun

    def __str__(self) -> str:
        return self.address

    @property
    def load(self) -> int:
        """What it has to do, in tokens of prefill."""
        return self._work + self._row * len(self.jobs)

    def hits(self, prompt: Prompt) -> int:
        """Tokens of a prompt that it need not compute: at least one is left."""
        return max(0, min(prompt.page * self.memory.hits(prompt.names), prompt.tokens - 1))

    def cost(self, prompt: Prompt) -> int:
        """Tokens of prefill until a prompt would be computed here."""
        return self.load + prompt.tokens - self.hits(prompt)

    def take(self, job: RoutedRequest) -> None:
        hits = self.hits(job.prompt)
        job.work, job.has_begun = job.prompt.tokens - hits, False
        self._work += job.work
        self.jobs.add(job)
        self.memory.sent(job.prompt.names)
        self.chosen += 1
        self.prompt_tokens += job.prompt.tokens
        self.hit_tokens += hits

    def begun(self, job: RoutedRequest) -> None:
        """The first of a job's answer has come: its prompt is computed."""
        if job in self.jobs and not job.has_begun:
            job.has_begun = True
            self._work -= job.work

    def leave(self, job: RoutedRequest) -> None:
        if job in self.jobs:
            self.begun(job)
            self.jobs.remove(job)
            self.memory.ended(job.prompt.names)

    def lose(self) -> None:
        """It does not answer: whatever it had goes on elsewhere."""
        self.lost += self.is_up
        self.is_up = self.is_ready = False
        self.memory.forget()
        for connection in list(self.connections):
            connection.abort()


def best(replicas: Iterable[Replica], prompt: Prompt, most: int, but: Collection[Replica]) -> Replica | None:
    """The replica that would have computed a prompt first, of those with fewer than `most` requests: the one
    with the longest prefix of it, unless that is busier by more than the prefix saves."""
    open = [one for one in replicas if one.is_ready and one not in but and len(one.jobs) < most]
    return min(open, key=lambda one: (one.cost(prompt), len(one.jobs), one.chosen), default=None)


def in_turn(
    replicas: Sequence[Replica], prompt: Prompt, most: int, but: Collection[Replica]
) -> Replica | None:
    """One after the other, whatever they have: what others are measured against."""
    open = [one for one in replicas if one.is_ready and one not in but and len(one.jobs) < most]
    return min(open, key=lambda one: one.chosen, default=None)

"""Placement policy of the router: the load of each replica, and the best replica for a prompt."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import attrgetter
from typing import Protocol

from .prefix_index import PrefixIndex

ROW = 32  # tokens of prefill that one generating request counts as
PRIME = (1 << 61) - 1  # of the hashes that order replicas
SPARE = 0.5  # share of a prompt by which its home may have more load than another replica, if none knows it


@dataclass(frozen=True)
class Prompt:
    """Prompt as the placement sees it.

    names: of its full pages, of `page` tokens each.
    tokens: its length, which may be an estimate.
    """

    names: Sequence[bytes] = ()
    page: int = 1
    tokens: int = 0


class ReplicaConnection(Protocol):
    """Connection of a request to its replica."""

    def abort(self) -> None: ...


@dataclass(eq=False)
class RoutedRequest:
    """Request that the router has placed.

    work: tokens of its prompt that its replica has to compute.
    has_begun: the first part of the answer has come.
    left: replicas that could not serve it.
    others: those of them whose realm differs from `realm`, the one of the answer so far.
    """

    prompt: Prompt
    work: int = 0
    has_begun: bool = False
    left: set["Replica"] = field(default_factory=set)
    others: set["Replica"] = field(default_factory=set)
    realm: str = ""

    def refused_by(self, replica: "Replica") -> None:
        """Exclude a replica whose weights or versions differ from those that began the answer."""
        self.left.add(replica)
        self.others.add(replica)

    def begin_anew(self) -> None:
        """Start the answer again: any realm may serve it."""
        self.left -= self.others
        self.others.clear()
        self.realm = ""


class Replica:
    """Server at an address: whether it is up and ready, and its requests. `load` is its outstanding work, in
    tokens of prefill."""

    def __init__(self, address: str, memory: PrefixIndex, row: int = ROW):
        self.address, self.memory, self._row = address, memory, row
        self.salt = number(blake2b(address.encode(), digest_size=8).digest())
        self.is_up = self.is_ready = False  # until the first health check
        self.realm = ""  # of its answers; empty while unknown
        self.jobs: set[RoutedRequest] = set()
        self.connections: dict[ReplicaConnection, None] = {}  # a set in order of time
        self.chosen = self.prompt_tokens = self.hit_tokens = self.lost = 0
        self.load = 0

    def __str__(self) -> str:
        return self.address

    def hits(self, prompt: Prompt) -> int:
        """Return the tokens of a prompt that are cached: at least one has to be computed."""
        return max(0, min(prompt.page * self.memory.hits(prompt.names), prompt.tokens - 1))

    def cost(self, prompt: Prompt) -> int:
        """Return the tokens of prefill until a prompt would be computed here."""
        return self.load + prompt.tokens - self.hits(prompt)

    def take(self, job: RoutedRequest) -> None:
        hits = self.hits(job.prompt)
        job.work, job.has_begun = job.prompt.tokens - hits, False
        self.load += job.work + self._row
        self.jobs.add(job)
        self.memory.sent(job.prompt.names)
        self.chosen += 1
        self.prompt_tokens += job.prompt.tokens
        self.hit_tokens += hits

    def begun(self, job: RoutedRequest) -> None:
        """The first part of a job's answer has come: its prompt is computed."""
        if job in self.jobs and not job.has_begun:
            job.has_begun = True
            self.load -= job.work

    def leave(self, job: RoutedRequest) -> None:
        if job in self.jobs:
            self.begun(job)
            self.jobs.remove(job)
            self.load -= self._row
            self.memory.ended(job.prompt.names)

    def lose(self) -> None:
        """Mark the replica as down and abort its connections; its requests are placed again."""
        self.lost += self.is_up
        self.is_up = self.is_ready = False
        self.memory.forget()
        for connection in list(self.connections):
            connection.abort()


def fitting(replicas: Sequence[Replica], realm: str, but: Collection[Replica]) -> Sequence[Replica]:
    """Return the replicas that can continue an answer of a realm, by their last known one; all replicas if
    none is known to fit, or if no realm is named."""
    if not realm:
        return replicas
    return [one for one in replicas if one.is_ready and one not in but and one.realm == realm] or replicas


def best(replicas: Iterable[Replica], prompt: Prompt, most: int, but: Collection[Replica]) -> Replica | None:
    """Return the replica that would have computed a prompt first, of those with fewer than `most`
    requests: the one with the longest cached prefix, unless its load is higher by more than the prefix
    saves. Of replicas that know equally much, the first page that none of them knows has its own order. If n
    replicas have the prefix, and the best has more load than the idlest by over 1 / sqrt(n) of it, another
    replica computes it, unless all pages of the prompt are known."""
    able = [one for one in replicas if one.is_ready and len(one.jobs) < most and one not in but]
    found, least = None, (math.inf, 0, 0)
    computed = min(prompt.tokens, 1)  # at least
    for one in able:
        if one.load + computed > least[0]:
            continue
        rank = one.cost(prompt), len(one.jobs), one.chosen
        if rank < least:
            found, least = one, rank
    return found and home(able, prompt, found)


def home(able: Sequence[Replica], prompt: Prompt, found: Replica) -> Replica:
    """Return the replica at which any router would begin a prefix that it has not sent yet, of those that
    know as much of the prompt as `found` and have little more load: routers that share nothing agree on it
    (rendezvous hashing: Thaler and Ravishankar, IEEE/ACM Transactions on Networking 1998)."""
    known = found.memory.hits(prompt.names)
    if known == len(prompt.names):
        return found
    alike, limit = able, math.inf
    if known:
        last, idle = prompt.names[known - 1], min(able, key=attrgetter("load"))
        alike = [one for one in able if one.memory.has(last)]
        # Each router sees only its own load: several would make too few copies if they waited for need.
        if found.load - idle.load > found.hits(prompt) / math.sqrt(len(alike)):
            known, found, limit = 0, idle, found.load  # a copy goes to no busier replica
            alike = [one for one in able if one is idle or not one.memory.has(last)]
    spare = prompt.tokens - found.hits(prompt) if known else SPARE * prompt.tokens
    page, most = number(prompt.names[known]), min(found.load + spare, limit)
    return max((one for one in alike if one.load <= most), key=lambda one: one.salt * page % PRIME)


def number(name: bytes) -> int:
    """Return the first eight bytes of a hash as a number."""
    return int.from_bytes(name[:8])

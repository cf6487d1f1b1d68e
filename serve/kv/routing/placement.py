"""Placement policy of the router: the load of each replica, and the best replica for a prompt."""

import asyncio
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import attrgetter
from typing import Protocol

from .prefix_index import PrefixIndex

TOKENS_PER_ROW = 32  # tokens of prefill that one generating request counts as
HASH_PRIME = (1 << 61) - 1  # modulus of the hashes that order replicas
# Share of a prompt's tokens by which a replica chosen by hash may have more load than the idlest.
HOME_LOAD_SHARE = 0.5


@dataclass(frozen=True)
class RoutedPrompt:
    """Prompt that is to be placed.

    page_hashes: hashes of its full pages.
    page_size: tokens of a page.
    tokens: number of its tokens, which may be an estimate.
    """

    page_hashes: Sequence[bytes] = ()
    page_size: int = 1
    tokens: int = 0


class ReplicaConnection(Protocol):
    """Connection of a request to its replica."""

    def abort(self) -> None: ...


@dataclass(eq=False)
class RoutedRequest:
    """Request that the router has placed.

    prefill_tokens: tokens of its prompt that its replica has to compute.
    has_begun: True once the first part of the answer has arrived.
    failed_replicas: replicas that could not serve it.
    mismatched_replicas: replicas in `failed_replicas` whose realm differs from `realm`.
    disconnected_replicas: replicas whose connection broke; it may go there again after their next health
        check.
    realm: realm of the answer so far; empty if there is no answer yet.
    """

    prompt: RoutedPrompt
    prefill_tokens: int = 0
    has_begun: bool = False
    failed_replicas: set["Replica"] = field(default_factory=set)
    mismatched_replicas: set["Replica"] = field(default_factory=set)
    disconnected_replicas: set["Replica"] = field(default_factory=set)
    realm: str = ""

    @property
    def excluded_replicas(self) -> set["Replica"]:
        """Replicas that cannot serve the request now."""
        return self.failed_replicas.union(
            replica for replica in self.disconnected_replicas if replica.is_suspect
        )

    def exclude_mismatched(self, replica: "Replica") -> None:
        """Exclude a replica whose realm (weights, versions) differs from the realm of the answer so far."""
        self.failed_replicas.add(replica)
        self.mismatched_replicas.add(replica)

    def reset_realm(self) -> None:
        """Start the answer again: a replica of any realm may serve it."""
        self.failed_replicas -= self.mismatched_replicas
        self.mismatched_replicas.clear()
        self.realm = ""


class Replica:
    """Server at an address, as the router knows it.

    prefix_index: index of the pages that it has cached.
    tokens_per_row: tokens of prefill that a generating request counts as.
    load: outstanding work, in tokens of prefill.
    chosen, lost: numbers of requests that it was chosen for, and of times that it went down.
    prompt_tokens, hit_tokens: numbers of prompt tokens of all its requests, and of those that were cached.
    """

    def __init__(self, address: str, prefix_index: PrefixIndex, tokens_per_row: int = TOKENS_PER_ROW):
        self.address, self.prefix_index, self._tokens_per_row = address, prefix_index, tokens_per_row
        self.salt = hash_to_int(blake2b(address.encode(), digest_size=8).digest())
        self.is_up = self.is_ready = False  # until the first health check
        self.suspicion = asyncio.Event()  # set when a connection breaks, until the next health check
        self.realm = ""  # realm of its answers; empty while unknown
        self.requests: set[RoutedRequest] = set()
        self.connections: dict[ReplicaConnection, None] = {}  # an ordered set, the oldest first
        self.chosen = self.prompt_tokens = self.hit_tokens = self.lost = 0
        self.load = 0

    def __str__(self) -> str:
        return self.address

    @property
    def is_suspect(self) -> bool:
        """True if a connection broke since the last health check."""
        return self.suspicion.is_set()

    def suspect(self) -> None:
        """Request a health check now, because a connection broke."""
        self.suspicion.set()

    def cached_tokens(self, prompt: RoutedPrompt) -> int:
        """Return the number of a prompt's tokens that are cached. At least one token has to be computed."""
        return max(
            0, min(prompt.page_size * self.prefix_index.count_cached(prompt.page_hashes), prompt.tokens - 1)
        )

    def prefill_cost(self, prompt: RoutedPrompt) -> int:
        """Return the tokens of prefill until this replica would have computed a prompt, other work
        included."""
        return self.load + prompt.tokens - self.cached_tokens(prompt)

    def add_request(self, routed_request: RoutedRequest) -> None:
        """Count a request that is sent to this replica."""
        cached = self.cached_tokens(routed_request.prompt)
        routed_request.prefill_tokens, routed_request.has_begun = routed_request.prompt.tokens - cached, False
        self.load += routed_request.prefill_tokens + self._tokens_per_row
        self.requests.add(routed_request)
        self.prefix_index.on_prompt_sent(routed_request.prompt.page_hashes)
        self.chosen += 1
        self.prompt_tokens += routed_request.prompt.tokens
        self.hit_tokens += cached

    def on_prefill_done(self, routed_request: RoutedRequest) -> None:
        """Subtract a request's prompt from the load: the first part of its answer has arrived."""
        if routed_request in self.requests and not routed_request.has_begun:
            routed_request.has_begun = True
            self.load -= routed_request.prefill_tokens

    def remove_request(self, routed_request: RoutedRequest) -> None:
        """Count a request no more, because it has ended or goes to another replica."""
        if routed_request in self.requests:
            self.on_prefill_done(routed_request)
            self.requests.remove(routed_request)
            self.load -= self._tokens_per_row
            self.prefix_index.on_request_ended(routed_request.prompt.page_hashes)

    def mark_down(self) -> None:
        """Mark the replica as down and abort its connections; its requests are placed again."""
        self.lost += self.is_up
        self.is_up = self.is_ready = False
        self.prefix_index.clear()
        for connection in list(self.connections):
            connection.abort()


def replicas_of_realm(
    replicas: Sequence[Replica], realm: str, excluded: Collection[Replica]
) -> Sequence[Replica]:
    """Return the replicas whose last known realm is this one. Returns all replicas if there are none, or if
    the realm is empty."""
    if not realm:
        return replicas
    return [
        replica
        for replica in replicas
        if replica.is_ready and replica not in excluded and replica.realm == realm
    ] or replicas


def choose_replica(
    replicas: Iterable[Replica], prompt: RoutedPrompt, max_in_flight: int, excluded: Collection[Replica]
) -> Replica | None:
    """Return the replica that would have computed a prompt first; None if each has `max_in_flight` requests,
    is not ready or is in `excluded`.

    This is the replica with the longest cached prefix, unless its load is higher by more tokens than the
    prefix has. Among replicas with equally long prefixes, `rendezvous_replica` chooses. Example: of two
    replicas with equal load, one with 64 of a prompt's 96 tokens cached costs 32, the other 96.
    """
    candidates = [
        replica
        for replica in replicas
        if replica.is_ready and len(replica.requests) < max_in_flight and replica not in excluded
    ]
    chosen, best_rank = None, (math.inf, 0, 0)
    min_tokens = min(prompt.tokens, 1)  # tokens that every replica has to compute, at least
    for replica in candidates:
        if replica.load + min_tokens > best_rank[0]:
            continue
        rank = replica.prefill_cost(prompt), len(replica.requests), replica.chosen
        if rank < best_rank:
            chosen, best_rank = replica, rank
    return chosen and rendezvous_replica(candidates, prompt, chosen)


def rendezvous_replica(
    candidates: Sequence[Replica], prompt: RoutedPrompt, chosen_replica: Replica
) -> Replica:
    """Return the replica with the highest hash, among replicas that have as long a prefix cached as
    `chosen_replica` and little more load.

    The hash is of the replica and of the first page that none of them has. So routers that share nothing send
    the same new prefix to the same replica (rendezvous hashing: Thaler and Ravishankar, IEEE/ACM Transactions
    on Networking 1998). Example: if no replica has any page of two prompts with the same first page, both go
    to the same replica.

    If n replicas have the prefix and `chosen_replica` has more load than the idlest by over 1 / sqrt(n) of
    the prefix, another replica computes a copy of it. If all pages are cached, `chosen_replica` is returned.
    """
    known_pages = chosen_replica.prefix_index.count_cached(prompt.page_hashes)
    if known_pages == len(prompt.page_hashes):
        return chosen_replica
    peers, copy_limit = candidates, math.inf
    if known_pages:
        last_page, idle = prompt.page_hashes[known_pages - 1], min(candidates, key=attrgetter("load"))
        peers = [replica for replica in candidates if replica.prefix_index.has(last_page)]
        # Each router knows its own requests only: with a higher bound, several would make too few copies.
        if chosen_replica.load - idle.load > chosen_replica.cached_tokens(prompt) / math.sqrt(len(peers)):
            # a copy goes to no busier replica
            known_pages, chosen_replica, copy_limit = 0, idle, chosen_replica.load
            peers = [
                replica
                for replica in candidates
                if replica is idle or not replica.prefix_index.has(last_page)
            ]
    spare_tokens = (
        prompt.tokens - chosen_replica.cached_tokens(prompt)
        if known_pages
        else HOME_LOAD_SHARE * prompt.tokens
    )
    page_number = hash_to_int(prompt.page_hashes[known_pages])
    max_load = min(chosen_replica.load + spare_tokens, copy_limit)
    return max(
        (replica for replica in peers if replica.load <= max_load),
        key=lambda replica: replica.salt * page_number % HASH_PRIME,
    )


def hash_to_int(digest: bytes) -> int:
    """Return the first eight bytes of a hash as an integer."""
    return int.from_bytes(digest[:8])

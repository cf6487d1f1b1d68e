"""Faults of the past and their kin, planted one at a time: a simulation that does not find them within some
seeds is no proof of anything."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from duetto.kvcache import page_hash
from duetto.kvcache.pool import PagePool
from duetto.kvcache.tables import PageTables
from duetto.serve.engine.core import scheduler
from duetto.serve.engine.core.results import InFlightSteps
from duetto.serve.engine.core.scheduler import Scheduler
from duetto.serve.host.blob_store import BlobStore
from duetto.serve.kv.offload.disk import DIGITS, DiskTier
from duetto.serve.kv.offload.tiering import KVOffloader
from duetto.serve.kv.routing.placement import Replica
from duetto.serve.server.router import proxy
from duetto.serve.server.router.proxy import ProxyRequest
from duetto.serve.server.router.queue import RequestQueue
from duetto.serve.server.router.resumable import COMMENT, END, ResumableStream
from duetto.serve.server.routes import completions
from duetto.serve.server.service.fair_queue import FairQueue
from duetto.serve.text.grammar.constraint import Constraint

Patch = tuple[Any, str, Any]


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing."""


def charge_of_one(path: str, fields: Any, prompt: Any) -> int:
    """Charge one completion, however many are asked for."""
    return max(1, prompt.tokens + fields.get("max_tokens", 16))


def take_end_tokens(self: Any, token: int) -> None:
    """Give a grammar every token, end tokens too."""
    if not self._matcher.try_consume_tokens([token]):
        raise ValueError(f"token {token} is not allowed")


def release_shared(self: PagePool, pages: Sequence[int]) -> None:
    """Free pages that other requests still share."""
    for page in reversed(pages):
        self.references[page] -= 1
        self._free[page] = None


def release_slotless(self: Scheduler, request: Any) -> None:
    """Forget the slot of a request that ends."""
    before = list(self.free_slots)
    RELEASE(self, request)
    self.free_slots = before


def read_unchecked(self: BlobStore, name: str) -> bytes | None:
    """Read a file whatever its checksum is."""
    found = self.files.read(self.path(name))
    return None if found is None else found[self.format.head :]


def file_of_any(self: DiskTier, key: bytes) -> str:
    """Name a file without the realm."""
    return hashlib.blake2b(key, digest_size=DIGITS // 2).hexdigest()


def pass_at_once(self: ResumableStream, block: bytes) -> bytes:
    """Pass events on before their tokens are known."""
    passed = PASSED(self, block)
    if block.startswith(COMMENT):
        return b"" if block != END and not passed.startswith(COMMENT) else passed
    self._held.clear()
    return block + b"\n\n"


def unchained(
    names: list[bytes], tokens: Sequence[int], pages: int, page_size: int, start: bytes, prompt: Any = None
) -> None:
    """Name pages by their own tokens alone."""
    for i in range(len(names), pages):
        own: list[bytes] = []
        EXTEND(own, tokens[i * page_size : (i + 1) * page_size], 1, page_size, start)
        names.append(own[0])


def restart_always(self: ProxyRequest) -> bool:
    """Begin an answer anew of which the client has a part."""
    if self.stream is None:
        return False
    self.stream._outputs, self.stream.realm = [], ""
    return True


def leave_work(self: Replica, job: Any) -> None:
    """Forget a job that ends, but not its work."""
    if job in self.jobs:
        self.jobs.remove(job)


def lose_quietly(self: Replica) -> None:
    """Mark a replica as down, and leave its connections."""
    connections, self.connections = self.connections, {}
    LOSE(self)
    self.connections = connections


def any_replica(self: RequestQueue, job: Any) -> Any:
    """Return all replicas, whatever weights they have."""
    return self.replicas


RELEASE, EXTEND, LOSE = Scheduler.release, page_hash.extend, Replica.lose
PASSED = ResumableStream._passed

PLANTED: dict[str, tuple[str, list[Patch]]] = {
    "other weights": (
        "an answer goes on in a replica with other weights",
        [(completions, "require_realm", nothing), (RequestQueue, "_fitting", any_replica)],
    ),
    "end tokens": (
        "a grammar is given end tokens, also those of a resumed answer",
        [(Constraint, "_take", take_end_tokens)],
    ),
    "charge": ("fair shares do not count n", [(proxy, "charge", charge_of_one)]),
    "fair clock": ("the clock of fair shares stands still", [(FairQueue, "served", nothing)]),
    "freed twice": ("a page that two requests share is freed by the first", [(PagePool, "release", release_shared)]),
    "torn page": ("a torn page on the disk is read as good", [(BlobStore, "read", read_unchecked)]),
    "lost admission": (
        "a preempted request is not put back into the queue",
        [(Scheduler, "preempt", Scheduler.release)],
    ),
    "old prefixes": ("pages of older weights are found", [(PageTables, "forget", nothing)]),
    "old evictions": ("pages of a lost cache are kept in tiers", [(KVOffloader, "lose", nothing)]),
    "realm of pages": ("pages on the disk are found by engines with other weights", [(DiskTier, "file", file_of_any)]),
    "early events": ("events pass the router before their tokens are known", [(ResumableStream, "_passed", pass_at_once)]),
    "steps of a lost cache": ("results of steps before a failure are read", [(InFlightSteps, "clear", nothing)]),
    "slot": ("the slot of a request that ends is lost", [(Scheduler, "release", release_slotless)]),
    "unchained names": ("a page is named by its own tokens alone", [(scheduler, "extend", unchained)]),
    "begun anew": ("a stream begins anew when its client has a part", [(ProxyRequest, "restart", restart_always)]),
    "load": ("a job that ends leaves its load in the router", [(Replica, "leave", leave_work)]),
    "silent loss": ("connections of a lost replica stay open", [(Replica, "lose", lose_quietly)]),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a fault while the block runs."""
    with ExitStack() as stack:
        for target, attribute, replacement in PLANTED[name][1]:
            stack.enter_context(patch.object(target, attribute, replacement))
        yield


def found_by(name: str, run: Callable[[int], Any], seeds: Sequence[int]) -> int | None:
    """Return the first of some seeds that finds a planted fault; None if none does."""
    with planted(name):
        return next((seed for seed in seeds if run(seed).error), None)

"""Faults of the past and their kin, planted one at a time: a simulation that does not find them within some
seeds is no proof of anything."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from benchmarks.chaos.run import kind_of, run
from duetto.kvcache import page_hash
from duetto.kvcache.pool import PagePool
from duetto.kvcache.tables import PageTables
from duetto.serve.engine.core import scheduler
from duetto.serve.engine.core.results import InFlightSteps
from duetto.serve.engine.core.scheduler import Scheduler
from duetto.serve.host.blob_store import BlobStore
from duetto.serve.kv.offload.disk import FILE_DIGITS, DiskTier
from duetto.serve.kv.offload.mover import PageMover
from duetto.serve.kv.routing.placement import Replica
from duetto.serve.server.router import proxy, request_queue
from duetto.serve.server.router.proxy import ProxyRequest
from duetto.serve.server.router.resumable import COMMENT_PREFIX, END_COMMENT, ResumableStream
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
    return None if found is None else found[self.format.header_bytes :]


def file_of_any(self: DiskTier, key: bytes) -> str:
    """Name a file without the realm."""
    return hashlib.blake2b(key, digest_size=FILE_DIGITS // 2).hexdigest()


def pass_at_once(self: ResumableStream, block: bytes) -> bytes:
    """Pass events on before their tokens are known."""
    passed = PASSED(self, block)
    if block.startswith(COMMENT_PREFIX):
        return b"" if block != END_COMMENT and not passed.startswith(COMMENT_PREFIX) else passed
    self._held.clear()
    return block + b"\n\n"


def unchained(
    names: list[bytes],
    tokens: Sequence[int],
    pages: int,
    page_size: int,
    start: bytes,
    prompt: Any = None,
    spans: Sequence[Any] = (),
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
    if job in self.requests:
        self.requests.remove(job)


def lose_quietly(self: Replica) -> None:
    """Mark a replica as down, and leave its connections."""
    connections, self.connections = self.connections, {}
    LOSE(self)
    self.connections = connections


def any_replica(replicas: Any, realm: str, but: Any) -> Any:
    """Return all replicas, whatever weights they have."""
    return replicas


RELEASE, EXTEND, LOSE = Scheduler.release, page_hash.extend_page_hashes, Replica.mark_down
PASSED = ResumableStream._pass_block


@dataclass(frozen=True)
class Planted:
    """A fault that is planted by patches, and the kind of simulation that looks for it."""

    about: str
    kind: str
    patches: tuple[Patch, ...]


def in_engine(about: str, *patches: Patch) -> Planted:
    return Planted(about, "engine", patches)


def in_fleet(about: str, *patches: Patch) -> Planted:
    return Planted(about, "fleet", patches)


PLANTED: dict[str, Planted] = {
    "other weights": in_fleet(
        "an answer is resumed by a replica with other weights",
        (completions, "require_realm", nothing),
        (request_queue, "replicas_of_realm", any_replica),
    ),
    "end tokens": in_fleet(
        "a grammar gets end tokens, also those of a resumed answer", (Constraint, "_accept", take_end_tokens)
    ),
    "charge": in_fleet("fair shares do not count n", (proxy, "charged_tokens", charge_of_one)),
    "fair clock": in_fleet("the clock of fair shares stands still", (FairQueue, "on_served", nothing)),
    "early events": in_fleet(
        "events pass the router before their tokens are known", (ResumableStream, "_pass_block", pass_at_once)
    ),
    "begun anew": in_fleet(
        "a stream begins anew after the client has received a part",
        (ProxyRequest, "restart_answer", restart_always),
    ),
    "load": in_fleet("an ended job leaves its load in the router", (Replica, "remove_request", leave_work)),
    "silent loss": in_fleet("connections of a lost replica stay open", (Replica, "mark_down", lose_quietly)),
    "freed twice": in_engine(
        "a shared page is freed by its first request", (PagePool, "release", release_shared)
    ),
    "torn page": in_engine("a torn page on the disk is read as good", (BlobStore, "read", read_unchecked)),
    "lost admission": in_engine(
        "a preempted request is not put back into the queue", (Scheduler, "preempt", Scheduler.release)
    ),
    "old prefixes": in_engine(
        "pages of older weights are found", (PageTables, "reset_prefix_cache", nothing)
    ),
    "old tiers": in_engine(
        "pages of older weights are fetched from tiers", (PageMover, "on_weights_replaced", nothing)
    ),
    "realm of pages": in_engine(
        "pages on the disk are found by engines with other weights", (DiskTier, "file_name", file_of_any)
    ),
    "steps of a lost cache": in_engine(
        "results of steps before a failure are read", (InFlightSteps, "clear", nothing)
    ),
    "slot": in_engine("the slot of an ended request is lost", (Scheduler, "release", release_slotless)),
    "unchained names": in_engine(
        "a page is named by its own tokens alone", (scheduler, "extend_page_hashes", unchained)
    ),
}


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a fault while the block runs."""
    with ExitStack() as stack:
        for target, attribute, replacement in PLANTED[name].patches:
            stack.enter_context(patch.object(target, attribute, replacement))
        yield


def found_by(name: str, seeds: range) -> int | None:
    """Return the first of some seeds that finds a planted fault; None if none does. Seeds of other
    simulations are left out."""
    with planted(name):
        own = (seed for seed in seeds if kind_of(seed) == PLANTED[name].kind)
        return next((seed for seed in own if run(seed).error), None)

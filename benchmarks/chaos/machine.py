"""A machine of the simulation: its disk, and the engine of the process that runs on it."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, cast

from benchmarks.chaos.faults import DISK, Fault
from benchmarks.chaos.simulated.device import ChaosExecutor, ChaosTransfers, number_of, weights_of
from benchmarks.chaos.simulated.disk import SimulatedDisk
from benchmarks.chaos.simulated.world import Process, SimulatedLoop
from duetto.kvcache.tables import max_window_pages
from duetto.serve.engine.core.engine import Engine
from duetto.serve.engine.core.scheduler_output import SchedulerConfig
from duetto.serve.kv.disagg.remote_tiers import RemoteKVTier
from duetto.serve.kv.offload.disk import PAGE_FORMAT, DiskTier
from duetto.serve.kv.offload.host import HostTier
from duetto.serve.kv.offload.mover import PageMover
from duetto.serve.kv.offload.page_finder import KVOffloader
from duetto.serve.kv.offload.tier import PageKey, Tier, TierChain
from duetto.serve.kv.offload.write_behind import WriteBehindTier
from duetto.serve.runtime.compiled.shapes import Shape, Sizes
from duetto.serve.runtime.equal_bits.classes import ShapeClasses

MOVE, WRITE = 0.01, 0.05  # seconds until a page is moved, and until the writer begins, at most
COMPUTE = 0.02  # seconds that a token is said to take: fetching always pays


class Violation(AssertionError):
    """An invariant does not hold."""


@cache
def folder() -> Path:
    """Return a folder of the user's own, in whose place simulated disks stand."""
    return Path(tempfile.mkdtemp(prefix="duetto-chaos-"))


@dataclass(frozen=True)
class MachineConfig:
    """Sizes of an engine and its tiers, in pages."""

    page_size: int = 4
    pages: int = 20
    seats: int = 3
    budget: int = 8
    decode_steps: int = 1
    rows: int = 2
    width: int = 4
    longest: int = 48
    same_bits: bool = True
    windows: tuple[int | None, ...] = (None,)
    host: int = 6
    disk: int = 16

    @classmethod
    def drawn(cls, random: Random) -> "MachineConfig":
        return cls(
            page_size=random.choice((2, 4, 4, 8)),
            pages=random.randint(9, 24) if random.random() < 0.75 else 60,
            seats=random.randint(2, 5),
            budget=random.choice((4, 8, 16)),
            decode_steps=random.choice((1, 1, 2, 4)),
            rows=random.randint(1, 3),
            same_bits=random.random() < 0.6,
            windows=random.choice(((None,), (None,), (None, 8), (6,))),
            host=random.choice((0, 0, 4, 12)),
            disk=random.choice((0, 12, 40, 40)),
        )

    @property
    def longest_request(self) -> int:
        return min(self.longest, self.pages * self.page_size)

    def sizes(self) -> Sizes:
        longest, work = self.longest_request, max(self.budget, self.decode_steps) + 1

        def count(window: int | None) -> int:
            if window is None:
                return self.pages
            one = min(max_window_pages(window, work, self.page_size), -(-longest // self.page_size))
            return max(one, min(self.pages, one * self.seats))

        return Sizes(longest, self.seats, tuple(map(count, self.windows)), self.page_size)

    def classes(self) -> ShapeClasses:
        prefill = {Shape("prefill", 1, 2), Shape("prefill", 1, 8), Shape("prefill", self.rows, 2)}
        decode = {Shape("decode", w, t) for w in (1, self.width) for t in (1, self.decode_steps)}
        return ShapeClasses(tuple(sorted(prefill)), tuple(sorted(decode)), self.same_bits)


class ChaosMover(PageMover):
    """A mover whose jobs are events of the simulation."""

    def __init__(self, *args: Any, loop: SimulatedLoop, disk: SimulatedDisk, random: Random, **options: Any):
        super().__init__(*args, **options)
        self._loop, self._disk, self._random, self._is_due = loop, disk, random, False

    def start(self) -> None: ...

    def _wake(self) -> None:
        if not self._is_due and len(self._jobs):
            self._is_due = True
            self._loop.call_later(self._random.random() * MOVE + self._disk.waited(), self._next)

    def _next(self) -> None:
        self._is_due = False
        if len(self._jobs) and (job := self._jobs.get(timeout=0)) is not None:
            self.run_job(job)
        self._wake()

    def offer(self, keys: Sequence[PageKey], leaves: Any) -> None:
        super().offer(keys, leaves)
        self._wake()

    def start_fetch(self, keys: Sequence[PageKey], page_fetch: Any, patience_seconds: float) -> None:
        super().start_fetch(keys, page_fetch, patience_seconds)
        self._wake()

    def wait_for_jobs(self) -> None:
        while len(self._jobs):
            job = self._jobs.get(timeout=0)
            if job is not None:
                self.run_job(job)

    @property
    def is_idle(self) -> bool:
        """True if no page is on its way."""
        return not (len(self._jobs) or self.staged_pages or any(self.offered_pages) or self.pending_offers)


class ChaosWriter(WriteBehindTier):
    """A writer whose work is an event, or is done when the end of the engine waits for it."""

    def __init__(self, tier: Tier, loop: SimulatedLoop, random: Random):
        super().__init__(tier, start=self._begin, linger_seconds=0.0)
        self._loop, self._random, self._due = loop, random, list[Callable[[], None]]()

    def _begin(self, work: Callable[[], None], name: str) -> None:
        self._due.append(work)
        self._loop.call_later(self._random.random() * WRITE, self._work)

    def _work(self) -> None:
        while self._due:
            self._due.pop()()

    def flush(self, deadline: float, max_bytes: int = 0) -> int:
        self._work()
        return super().flush(deadline, max_bytes)


class ChaosOffloader(KVOffloader):
    """Tiers of an engine that does not wait in real time."""

    def wait_for_pages(self) -> None: ...


class Machine:
    """A machine with a disk, and an engine while a process runs on it. `weights` are those that the next
    process loads."""

    def __init__(self, loop: SimulatedLoop, name: str, config: MachineConfig, random: Random):
        self.loop, self.name, self.config, self.random = loop, name, config, random
        self.disk = SimulatedDisk(loop.time, random)
        self.image = self.disk.image()
        self.weights, self.versions = 0, [0]  # versions: the weights of the engine by their version
        self.process = Process(loop, f"{name}.0")
        self.process.is_alive = False
        self.starts = 0
        self.peer_of: Callable[[Process], RemoteKVTier] | None = (
            None  # makes a process' prefill engine's tier
        )
        self.peer: RemoteKVTier | None = None
        self.engine: Engine
        self.mover: ChaosMover
        self.executor: ChaosExecutor

    def start(self) -> Process:
        """Start a process with a new engine; the caller runs the rest in its context."""
        self.starts += 1
        self.process = Process(self.loop, f"{self.name}.{self.starts}")
        config, sizes = self.config, self.config.sizes()
        self.executor = ChaosExecutor(sizes, config.windows, config.same_bits)
        limits = SchedulerConfig(sizes.num_slots, config.budget, 2, config.decode_steps)
        state = self.executor.fresh_arguments(weights_of(self.weights))
        self.engine = Engine(
            cast(Any, self.executor), config.classes(), state, limits, True, clock=self.loop.time
        )
        self.versions = [self.weights]
        self._attach(state.params)
        return self.process

    def _attach(self, params: Any) -> None:
        transfers = cast(Any, ChaosTransfers(self.executor))
        self.peer = None if self.peer_of is None else self.peer_of(self.process)
        own = {"loop": self.loop, "disk": self.disk, "random": self.random, "clock": self.loop.time}
        self.transfers = transfers
        self.mover = ChaosMover(self._chain(params), transfers, self._chain, self.peer, **own)
        self.engine.scheduler.page_finder = ChaosOffloader(self.mover, self.engine.tables, lambda: COMPUTE)

    def _chain(self, params: Any) -> TierChain:
        tiers: list[Tier] = []
        size = 8 * self.config.page_size
        if self.config.host:
            tiers.append(HostTier(self.config.host * size))
        if self.config.disk:
            realm = b"weights %d, %s" % (number_of(params), repr(self.config).encode())
            most = self.config.disk * (size + PAGE_FORMAT.header_bytes)
            tier = DiskTier(folder(), realm[:64], most, files=self.disk)
            tiers.append(ChaosWriter(tier, self.loop, self.random))
        if self.peer is not None:
            self.peer.expect_realm(b"weights %d" % number_of(params), self.transfers.page_bytes)
            tiers.append(self.peer)
        return TierChain(tiers)

    def stop(self) -> None:
        """End the process as it ends by itself: pages are written to the disk before."""
        self.mover.wait_for_jobs()
        self.process.context.copy().run(self.engine.close)
        self.process.kill()

    async def strike(self, fault: Fault) -> None:
        """Let a fault happen that is the machine's alone."""
        match fault.kind:
            case kind if kind in DISK:
                setattr(self.disk, f"is_{kind}", True)
                await asyncio.sleep(fault.seconds)
                setattr(self.disk, f"is_{kind}", False)
            case "device" | "device_read":
                self.executor.fail = "dispatch" if fault.kind == "device" else "read"
            case "clock":
                self.disk.jump += (fault.number % 20_000) - 10_000
            case _:
                self.disk.rot()

    def replace_weights(self, number: int) -> None:
        """Let the running engine have other weights; requests go on with them."""
        self.weights = number
        self.engine.update_params(cast(Any, weights_of(number)), keep=True)
        self.versions.append(number)


def audit(engine: Engine) -> None:
    """Raise Violation unless each page and slot is owned by exactly the requests that have it."""
    scheduler, tables = engine.scheduler, engine.tables
    running = scheduler.running
    if sorted([*scheduler.free_slots, *running]) != list(range(engine.sizes.num_slots)):
        raise Violation(f"slots: {sorted(scheduler.free_slots)} free, {sorted(running)} taken")
    for g, pool in enumerate(tables.pools):
        owned = Counter(page for r in running.values() for page in r.pages[g] if page >= 0)
        if any(owned[page] != count for page, count in enumerate(pool.references)):
            raise Violation(f"pages of group {g}: owned {dict(owned)}, counted {pool.references}")
        if pool.num_free != pool.references.count(0):
            raise Violation(f"{pool.num_free} pages are free, {pool.references.count(0)} without an owner")
        names = pool.list_cached_pages()
        if len({page for _, page in names}) != len(names):
            raise Violation("a page has two names")
    for slot, request in running.items():
        if request.slot != slot or not (
            request.pages and request.num_computed_tokens <= len(request.tokens) + 64
        ):
            raise Violation(f"request {request.id} is in slot {slot} and says {request.slot}")
    for _, request in scheduler.waiting:
        if request.slot is not None or request.pages:
            raise Violation(f"request {request.id} waits and has pages")


def audit_end(machine: Machine) -> None:
    """Raise Violation unless an idle engine has all of its pages and slots back."""
    audit(machine.engine)
    scheduler, tables = machine.engine.scheduler, machine.engine.tables
    if scheduler.has_work or any(pool.num_free != pool.num_pages for pool in tables.pools):
        raise Violation(f"{machine.name}: requests or pages are left in an idle engine")
    if any(tables.reserved_pages) or not machine.mover.is_idle:
        raise Violation(f"{machine.name}: reserved {tables.reserved_pages}, or pages on their way")

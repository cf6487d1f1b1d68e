"""An engine that computes prompts for another, in a process of its own: the real prefill worker, and between
the two a connection that is late, silent or cut."""

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from benchmarks.chaos.faults import Fault
from benchmarks.chaos.machine import Machine, audit, audit_end
from benchmarks.chaos.server import ChaosDriver
from benchmarks.chaos.simulated.device import VOCAB
from benchmarks.chaos.simulated.world import Process, SimulatedLoop
from duetto.serve.kv.disagg.service import OnReady
from duetto.serve.kv.offload.tier import PageContent, PageKey
from duetto.serve.llm.disaggregated import PrefillWorker
from duetto.serve.llm.session import Session
from duetto.serve.options.engine import EngineOptions

LATE, AGAIN = 0.02, 0.2  # seconds of a message, at most, and until a lost connection is made again
ROOM = 1e-6  # GiB of pages that the prefill engine keeps


def realm(weights: int) -> bytes:
    return b"weights %d" % weights


class PrefillSide:
    """A machine with an engine that computes prompts for others, and its connection."""

    def __init__(self, loop: SimulatedLoop, machine: Machine, random: Random):
        self.loop, self.machine, self.random = loop, machine, random
        self.silent_until = self.away_until = 0.0
        self.services: list[LossyService] = []
        self.worker: PrefillWorker

    def begin(self) -> None:
        process = self.machine.start()
        process.context.copy().run(self._build)

    def _build(self) -> None:
        self.session = Session(self.machine.engine)
        self.worker = PrefillWorker(EngineOptions(swap_space=ROOM, max_prefill_delay=0.0), VOCAB)
        self.worker.start_driver(self.session, partial(ChaosDriver, self.machine))

    @property
    def is_here(self) -> bool:
        return (
            self.machine.process.is_alive and self.worker.is_connected and self.loop.time() >= self.away_until
        )

    def lose(self) -> None:
        """End the connection of every client."""
        self.away_until = self.loop.time() + AGAIN
        for service in self.services:
            service.lose()

    def strike(self, fault: Fault) -> None:
        match fault.kind:
            case "prefill_device":
                self.machine.executor.fail = "read" if fault.number % 2 else "dispatch"
            case "silence":
                self.silent_until = self.loop.time() + fault.seconds
            case "hang_up":
                self.lose()
            case _:
                if fault.kind == "prefill_weights":
                    self.machine.weights = fault.number % 3
                self.machine.process.kill()
                self.lose()
                self.begin()

    def audit(self) -> None:
        audit(self.machine.engine)

    def audit_end(self) -> None:
        audit_end(self.machine)


class LossyService:
    """`PrefillService` of a decode process. Messages arrive late; while the connection is silent they are
    lost, and while it is away nothing is sent."""

    def __init__(self, side: PrefillSide, process: Process):
        self._side, self._process = side, process
        self._realm: bytes | None = None
        self._waiting: dict[int, OnReady] = {}
        self._numbers: dict[int, int] = {}  # the worker's, by those of this service
        self._count = 0
        side.services = [own for own in side.services if own._process.is_alive] + [self]

    @property
    def is_connected(self) -> bool:
        return self._side.is_here and self._realm == realm(self._side.machine.weights)

    @property
    def room_bytes(self) -> int:
        return self._side.worker.room_bytes

    def begin_prefill(self, prompt: Sequence[int], on_ready: OnReady, salt: bytes = b"") -> int:
        self._count += 1
        if not self.is_connected:
            on_ready([])
            return self._count
        self._waiting[self._count] = on_ready
        self._carry(self._side.machine.process, self._ask, self._count, list(prompt), salt)
        return self._count

    def cancel_prefill(self, number: int) -> None:
        if self._waiting.pop(number, None) is not None:
            self._carry(self._side.machine.process, self._cancel, number)

    def fetch(self, key: PageKey) -> PageContent | None:
        if not self.is_connected or self._side.loop.time() < self._side.silent_until:
            return None
        return self._side.worker.fetch(key)

    def expect_realm(self, realm: bytes | None, page_bytes: Sequence[int]) -> None:
        self._realm = realm
        self.lose()

    def lose(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for ready in waiting.values():
            self._process.run(ready, [])

    # ------------------------------------------------------------ in the other process, and back

    def _ask(self, number: int, prompt: list[int], salt: bytes) -> None:
        worker, process = self._side.worker, self._process

        def answer(keys: Sequence[PageKey]) -> None:
            self._carry(process, self._answered, number, list(keys))

        self._numbers[number] = worker.begin_prefill(prompt, answer, salt)

    def _cancel(self, number: int) -> None:
        if (own := self._numbers.pop(number, None)) is not None:
            self._side.worker.cancel_prefill(own)

    def _answered(self, number: int, keys: list[PageKey]) -> None:
        if (ready := self._waiting.pop(number, None)) is not None:
            ready(keys)

    def _carry(self, process: Process, work: Callable[..., Any], *args: Any) -> None:
        """Run work in a process when a message has arrived there, perhaps twice."""
        loop, random = self._side.loop, self._side.random
        if loop.time() < self._side.silent_until:
            return
        for _ in range(2 if work == self._answered and random.random() < 0.1 else 1):
            loop.call_later(random.random() * LATE, self._arrive, process, work, args)

    def _arrive(self, process: Process, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if process.is_alive and self._side.is_here:
            self._side.loop.call_soon(work, *args, context=process.context.copy())

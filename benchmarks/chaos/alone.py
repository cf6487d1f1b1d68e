"""One engine under faults of its device, disk and process: scheduler, page tables, prefix cache, offload."""

import asyncio
from dataclasses import dataclass, field, replace
from random import Random

from benchmarks.chaos.faults import ENGINE, LOCAL, PREFILL, Fault, drawn
from benchmarks.chaos.handed import LossyService, PrefillSide
from benchmarks.chaos.machine import Machine, MachineConfig, Violation, audit, audit_end
from benchmarks.chaos.simulated.device import BROKEN, VOCAB, Oracle, token_after
from benchmarks.chaos.simulated.world import SimulatedLoop, hashed
from duetto.sampling.params import SamplingParams
from duetto.serve.engine.core.request import Request, RequestTimes
from duetto.serve.kv.disagg.remote_tiers import RemoteKVTier

UNTIL, LIMIT = 1.0, 120.0  # seconds in which faults begin, and within which all ends
STEP = 0.008  # seconds of a step, at most
PATIENCE = 0.3  # seconds that a request waits for a prefill engine
ENGINE_NUMBERS = 4  # weights


@dataclass
class Ask:
    """What a client wants of an engine."""

    number: int
    at: float
    prompt: list[int]
    most: int
    seed: int
    stops: tuple[int, ...]
    priority: int
    leaves: float | None
    tokens: list[int] = field(default_factory=list)  # known before the process was lost
    made: int = 0  # weights that these follow from
    request: Request | None = None


def family(random: Random, families: list[list[int]], longest: int, page: int) -> list[int]:
    """Return a prompt that begins as others do, or has their pages behind one of its own."""
    shared = random.choice(families)
    if random.random() < 0.2:
        shared = [random.randrange(VOCAB) for _ in range(page)] + shared
    cut = random.randint(0, len(shared)) if random.random() < 0.6 else len(shared)
    own = [random.randrange(VOCAB) for _ in range(random.randint(1, 10))]
    return [*shared[:cut], *own][:longest]


class Alone:
    """The simulation of one seed."""

    def __init__(self, seed: int, is_helped: bool = False):
        random = Random(seed)
        self.loop = SimulatedLoop(Random(seed))
        self.config = MachineConfig.drawn(random)
        self.machine = Machine(self.loop, "machine", self.config, Random(seed + 1))
        self.oracle = Oracle(self.config.windows, self.config.same_bits)
        self.random = Random(seed + 2)
        self.faults = drawn(random, (*PREFILL, *ENGINE) if is_helped else ENGINE, 14, 1, UNTIL)
        self.side = self._side(Random(seed + 3)) if is_helped else None
        longest = self.config.longest_request
        families = [[random.randrange(VOCAB) for _ in range(30)] for _ in range(2)]
        self.asks = [self._ask(random, i, families, longest) for i in range(random.randint(6, 30))]
        self.steps = 0
        self.asked = asyncio.Event()

    def _side(self, random: Random) -> PrefillSide:
        """Return an engine that computes the prompts, for every process of the machine."""
        config = replace(self.config, host=40, disk=0)
        side = PrefillSide(self.loop, Machine(self.loop, "prefill", config, random), random)
        self.machine.peer_of = lambda process: RemoteKVTier(
            LossyService(side, process), PATIENCE, self.loop.time
        )
        return side

    def _ask(self, random: Random, number: int, families: list[list[int]], longest: int) -> Ask:
        prompt = family(random, families, longest - 2, self.config.page_size)
        return Ask(
            number,
            at=random.random() * UNTIL if random.random() < 0.8 else random.random() * 0.02,
            prompt=prompt,
            most=random.randint(1, min(20, longest - len(prompt))),
            seed=random.randrange(1 << 20),
            stops=(7,) if random.random() < 0.7 else (),
            priority=random.choice((0, 0, 0, 1)),
            leaves=random.random() * 0.4 if random.random() < 0.15 else None,
        )

    # ------------------------------------------------------------ the process

    def begin(self) -> None:
        process = self.machine.start()
        process.start(self._drive())
        for ask in self.asks:
            if ask.at <= self.loop.time() and (ask.request is None or not ask.request.is_finished):
                self._submit(ask)

    async def _drive(self) -> None:
        engine = self.machine.engine
        while True:
            if engine.has_work and not engine.is_sleeping:
                self.step()
                await asyncio.sleep(self.random.random() * STEP)
            else:
                self.asked.clear()
                await self.asked.wait()

    def step(self) -> None:
        self.steps += 1
        try:
            self.machine.engine.step()
        except BROKEN:  # the process ends, and another begins
            self.restart()
            return
        audit(self.machine.engine)
        for ask in self.asks:
            if ask.request is not None and ask.request.is_finished:
                self._check(ask)

    def restart(self, by_itself: bool = False) -> None:
        for ask in self.asks:
            if ask.request is not None and not ask.request.is_finished:
                self._known(ask)
                ask.request = None
        self.machine.stop() if by_itself else self.machine.process.kill()
        self.begin()

    def _known(self, ask: Ask) -> None:
        """Keep the tokens of a lost request, if the next process has the weights that they follow from."""
        request = ask.request
        assert request is not None
        made = {self._made(ask, request, i) for i in range(request.num_output_tokens)}
        ask.tokens = request.output_tokens if made <= {self.machine.weights} else []
        ask.made = self.machine.weights

    def _submit(self, ask: Ask) -> None:
        params = SamplingParams(max_tokens=ask.most, temperature=1.0, seed=ask.seed)
        request = Request(
            id=str(ask.number),
            prompt=list(ask.prompt),
            params=params,
            seed=ask.seed,
            end=len(ask.prompt) + ask.most,
            stop_ids=ask.stops,
            priority=ask.priority,
            arrival=ask.number,
            times=RequestTimes(self.loop.time(), 0.0, now=self.loop.time),
        )
        if ask.tokens:
            request.append_resumed_tokens(ask.tokens)
            request.times = RequestTimes(self.loop.time(), 0.0, now=self.loop.time)
        ask.request = request
        if request.is_finished:
            return self._check(ask)
        self.machine.engine.submit(request)
        self.asked.set()

    # ------------------------------------------------------------ checks

    def _check(self, ask: Ask) -> None:
        """Compare a request that has ended with the oracle, once."""
        request = ask.request
        assert request is not None
        if getattr(request, "is_checked", False):
            return
        request.is_checked = True  # type: ignore[attr-defined]
        tokens, prompt, keys, made = request.tokens, len(ask.prompt), list[int](), -1
        for i in range(request.num_output_tokens):
            weights = self._made(ask, request, i)
            keys, made = (keys if weights == made else []), weights
            self.oracle.keys(weights, tokens[: prompt + i], prompt, keys)
            wanted = token_after(self.oracle.sum(keys, prompt + i - 1), ask.seed, prompt + i)
            if tokens[prompt + i] != wanted:
                raise Violation(f"request {ask.number}: token {i} is {tokens[prompt + i]}, not {wanted}")
        self._check_end(ask, request)

    def _made(self, ask: Ask, request: Request, i: int) -> int:
        """Return the number of the weights that a request's token follows from."""
        versions = [version for start, version in request.weights_versions if start <= i]
        return (
            self.machine.versions[versions[-1]] if versions and i >= request.num_resumed_tokens else ask.made
        )

    def _check_end(self, ask: Ask, request: Request) -> None:
        stopped = [i for i, token in enumerate(request.output_tokens) if token in ask.stops]
        whole = request.num_output_tokens == ask.most or stopped == [request.num_output_tokens - 1]
        if stopped[:-1] or (request.finish_reason != "abort" and not whole):
            raise Violation(f"request {ask.number} ended by {request.finish_reason}: {request.output_tokens}")
        if request.finish_reason == "abort" and (ask.leaves is None or whole):
            raise Violation(f"request {ask.number} was aborted")

    # ------------------------------------------------------------ what happens

    async def arrive(self, ask: Ask) -> None:
        await asyncio.sleep(ask.at)
        if ask.request is None:
            self._submit(ask)
        if ask.leaves is not None:
            await asyncio.sleep(ask.leaves)
            if ask.request is not None and not ask.request.is_finished:
                self.machine.engine.abort(ask.request)
                audit(self.machine.engine)
                self._check(ask)

    async def strike(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        machine = self.machine
        match fault.kind:
            case kind if kind in LOCAL:
                await machine.strike(fault)
            case "weights":
                machine.replace_weights(fault.number % ENGINE_NUMBERS)
                audit(machine.engine)
            case "sleep":
                await self._sleep(fault)
            case kind if kind in PREFILL and self.side is not None:
                self.side.strike(fault)
            case _:
                self._end_process(fault)

    async def _sleep(self, fault: Fault) -> None:
        engine = self.machine.engine
        if engine.is_sleeping:
            return
        engine.sleep(fault.number % 2)
        audit(engine)
        await asyncio.sleep(fault.seconds / 4)
        if self.machine.engine is engine:
            engine.wake_up(["weights", "kv_cache", "scheduling"])
            self.asked.set()

    def _end_process(self, fault: Fault) -> None:
        disk = self.machine.disk
        if fault.kind == "power":
            disk.lose_power()
        elif fault.kind == "old_disk":
            old, self.machine.image = self.machine.image, disk.image()
            disk.restore(old)
        if fault.number % 2 == 0:
            self.machine.weights = fault.number // 2 % ENGINE_NUMBERS
        self.restart(fault.kind == "stop")

    async def play(self, faults: list[Fault]) -> None:
        if self.side is not None:
            self.side.begin()
        self.begin()
        events = [self.loop.create_task(self.arrive(ask)) for ask in self.asks]
        events += [self.loop.create_task(self.strike(fault)) for fault in faults]
        while not (all(task.done() for task in events) and self._is_over):
            if self.loop.errors or any(t.done() and t.exception() for t in events):
                break
            if self.loop.time() > LIMIT:
                left = [a.number for a in self.asks if a.request is None or not a.request.is_finished]
                raise Violation(f"requests {left} have not ended")
            await asyncio.sleep(0.05)
        for task in events:
            if task.done() and (error := task.exception()) is not None:
                raise error
        while self.loop.time() < LIMIT and not self.machine.mover.is_idle:
            await asyncio.sleep(0.2)
        if not self.loop.errors:
            audit_end(self.machine)
            if self.side is not None:
                self.side.audit()

    def trace(self) -> str:
        """Return a hash of all tokens and times."""
        ended = [(a.number, a.request.tokens, a.request.times.finish) for a in self.asks if a.request]
        return hashed(self.loop, ended)

    @property
    def _is_over(self) -> bool:
        return all(a.request is not None and a.request.is_finished for a in self.asks) and not (
            self.machine.engine.in_flight_steps or self.machine.disk.is_slow
        )

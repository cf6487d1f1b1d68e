"""A router and its replicas under faults of processes, connections and disks: placement, health, resumed
answers, realms, fair shares."""

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from benchmarks.chaos.alone import family
from benchmarks.chaos.clients import Asked, Client, Verdict
from benchmarks.chaos.fairness import FairnessMonitor
from benchmarks.chaos.faults import FLEET, LOCAL, Fault, drawn
from benchmarks.chaos.machine import Machine, MachineConfig, Violation, audit_end
from benchmarks.chaos.server import ChaosReplica
from benchmarks.chaos.simulated.device import VOCAB, Oracle
from benchmarks.chaos.simulated.network import Network
from benchmarks.chaos.simulated.world import SimulatedLoop, hashed
from duetto.serve.engine.core.engine import MAX_FAILURES
from duetto.serve.kv.routing.placement import Replica, RoutedPrompt, choose_replica
from duetto.serve.kv.routing.prefix_index import AssumedPrefixIndex
from duetto.serve.options.router import RouterOptions
from duetto.serve.options.server import ServerOptions
from duetto.serve.server.router.health import HealthChecker
from duetto.serve.server.router.prompts import TextPageHasher
from duetto.serve.server.router.proxy import OTHER_REALM_ERROR, Proxy
from duetto.serve.server.router.request_queue import PrefillPool, RequestQueue

UNTIL, LIMIT = 1.5, 120.0  # seconds in which faults begin, and within which all ends
CALM = 25.0  # seconds after which no fault is felt any more
# Seconds for which a fault may be felt after its end: two failed health checks, and a good one.
RECOVERY = 4.0
REBOOT = 4.0  # seconds that a machine without power takes at least, longer than the router needs to miss it
NUMBERS = 3  # weights
MOST_LOSSES = 2  # that an answer bears: the router's attempts, less one
LOSSES = ("kill", "power", "old_disk", "other_weights", "cut_off", "drain")  # of a replica


@dataclass
class Strike:
    """A fault that has struck. `until`: when it was over."""

    fault: Fault
    until: float = math.inf


class Fleet:
    """The simulation of one seed."""

    def __init__(self, seed: int):
        random = Random(seed)
        self.loop, self.random = SimulatedLoop(Random(seed)), Random(seed + 1)
        config = replace(MachineConfig.drawn(random), longest=48)
        self.config, self.oracle = config, Oracle(config.windows, config.same_bits)
        self.network = Network(self.loop, Random(seed + 2))
        count = random.choice((2, 2, 3))
        machines = [Machine(self.loop, f"replica{i}", config, Random(seed + 3 + i)) for i in range(count)]
        self.is_mixed = random.random() < 0.3  # in the middle of a rolling update
        machines[-1].weights = int(self.is_mixed)
        self.replicas = [ChaosReplica(machine, self.network) for machine in machines]
        self.faults = drawn(random, FLEET, 10, count, UNTIL)
        self.options = RouterOptions(
            replica=[own.address for own in self.replicas],
            page_size=config.page_size,
            cache_tokens=config.pages * config.page_size,
            max_in_flight=random.choice((1, 1, 2, 2, 4, 64)),
            health_period=0.5,
            health_timeout=1.0,
            replica_timeout=10.0,
        )
        self.monitor = FairnessMonitor()
        self.asks = self._asks(random)
        self.by_seed = {ask.seed: ask for ask in self.asks}
        self.clients: list[Client] = []
        self.struck: list[Strike] = []

    def _asks(self, random: Random) -> list[Asked]:
        longest = self.config.longest_request
        families = [[random.randrange(VOCAB) for _ in range(30)] for _ in range(3)]
        self.spread = random.choice((0.2, 0.8))  # share of the requests that do not come at once
        asks = [self._ask(random, i, families, longest) for i in range(random.randint(6, 36))]
        calm = [self._ask(random, 900 + i, families, longest) for i in range(2)]
        return asks + [replace(ask, at=CALM + ask.at, leaves=None) for ask in calm]

    def _ask(self, random: Random, number: int, families: list[list[int]], longest: int) -> Asked:
        prompt = family(random, families, longest - 2, self.config.page_size)
        room, client = longest - len(prompt), random.choice(("ann", "ben", "eve", "eve"))
        burst = {"ann": 0.0, "ben": 0.4, "eve": 0.0}[client]  # seconds before which a client does not come
        n = random.choice((1, 1, 1, 2)) if client != "eve" else random.choice((1, 4, 6))
        grammar = random.randint(1, 6) if random.random() < 0.25 else None
        return Asked(
            number=number,
            client=client,
            at=burst + (random.random() * UNTIL if random.random() < self.spread else random.random() * 0.1),
            prompt=prompt,
            most=random.randint(1, min(20, room)),
            seed=number * 64 + random.randrange(8),
            n=n,
            stream=random.random() < 0.6,
            ignores_end=random.random() < 0.4,
            grammar=grammar,
            leaves=random.random() * 0.6 if random.random() < 0.15 else None,
        )

    # ------------------------------------------------------------ the router

    def _naming(self, path: str, body: Mapping[str, Any]) -> RoutedPrompt:
        """Name a prompt as the router does, and tell the monitor whose it is."""
        prompt = TextPageHasher(self.config.page_size)(path, body)
        self.monitor.queued(prompt, self.by_seed[body["seed"]])
        return prompt

    def _choose(
        self, replicas: Sequence[Replica], prompt: RoutedPrompt, most: int, but: Any
    ) -> Replica | None:
        found = choose_replica(replicas, prompt, most, but)
        if found is not None:
            self.monitor.assigned(prompt)
        return found

    def _route(self) -> None:
        most = self.options.cache_tokens // self.options.page_size
        self.routed = [Replica(url, AssumedPrefixIndex(most)) for url in self.options.servers]
        server = ServerOptions(queue_timeout=40.0)
        self.line = RequestQueue(self.routed, self.options.max_in_flight, server, self._choose)
        self.proxy = Proxy(self.line, PrefillPool({}, 1), self._naming, self.options, server)
        self.health = HealthChecker(self.routed, self.line, self.options)

    # ------------------------------------------------------------ faults

    async def strike(self, fault: Fault) -> None:
        await asyncio.sleep(fault.at)
        strike = Strike(fault)
        self.struck.append(strike)
        await self._strike(fault)
        if fault.kind != "cut":  # which may wait for the next answer
            strike.until = self.loop.time()

    async def _strike(self, fault: Fault) -> None:
        replica = self.replicas[fault.machine]
        machine = replica.machine
        match fault.kind:
            case kind if kind in LOCAL:
                await machine.strike(fault)
            case "cut" if fault.number % 2:
                self.network.cut(Random(fault.number))
            case "cut":
                self.network.cuts += 1
            case "cut_off":
                self.network.cut_off[replica.host] = self.loop.time() + 3 * fault.seconds
                await asyncio.sleep(3 * fault.seconds)
            case "pause":
                await self._pause(replica, fault)
            case "drain":
                await self._drain(replica, fault)
            case _:
                await self._end_process(replica, fault)

    async def _pause(self, replica: ChaosReplica, fault: Fault) -> None:
        engine, service = replica.machine.engine, replica.service
        if replica.machine.process.is_alive and not engine.is_sleeping:
            engine.sleep(0)
            await asyncio.sleep(fault.seconds)
            engine.wake_up(["scheduling"])
            await service.change_engine(lambda: None)

    async def _drain(self, replica: ChaosReplica, fault: Fault) -> None:
        """End a process as SIGTERM does: it takes no requests, and ends after those that it has."""
        process = replica.machine.process
        if process.is_alive and not replica.service.is_draining:
            process.context.copy().run(replica.service.start_draining)
            while process.is_alive and not replica.service.ended.is_set():
                await asyncio.sleep(0.02)
            if process.is_alive:
                replica.machine.stop()
                await asyncio.sleep(fault.seconds)
                self._begin_again(replica, process)

    async def _end_process(self, replica: ChaosReplica, fault: Fault) -> None:
        machine, process = replica.machine, replica.machine.process
        if fault.kind == "power":
            machine.disk.lose_power()
        elif fault.kind == "old_disk":
            old, machine.image = machine.image, machine.disk.image()
            machine.disk.restore(old)
        elif fault.kind == "other_weights":
            machine.weights = fault.number % NUMBERS
        is_power = fault.kind == "power"
        process.kill(silently=is_power)
        await asyncio.sleep(fault.seconds + (REBOOT if is_power else 0.0))
        self._begin_again(replica, process)

    def _begin_again(self, replica: ChaosReplica, process: Any) -> None:
        """Start the next process, unless another event has done so."""
        if replica.machine.process is process:
            replica.begin()
            self.loop.create_task(self._watch(replica))

    async def _watch(self, replica: ChaosReplica) -> None:
        """Begin a process again whose engine has failed, as its operator would."""
        process, service = replica.machine.process, replica.service
        await service.ended.wait()
        if process.is_alive and service.error is not None:
            process.kill()
            await asyncio.sleep(0.5)
            self._begin_again(replica, process)

    # ------------------------------------------------------------ the course of a seed

    async def play(self, faults: list[Fault]) -> None:
        for replica in self.replicas:
            replica.begin()
            self.loop.create_task(self._watch(replica))
        self._route()
        self.clients = [Client(self.loop, self.proxy, ask, self.monitor.left) for ask in self.asks]
        tasks = [self.loop.create_task(client.run()) for client in self.clients]
        tasks += [self.loop.create_task(self.strike(fault)) for fault in faults]
        while not all(task.done() for task in tasks):
            if self.loop.errors or any(t.done() and t.exception() for t in tasks):
                break
            if self.loop.time() > LIMIT:
                left = [client.ask.number for client in self.clients if client.ended is None]
                raise Violation(f"requests {left} have no answer")
            await asyncio.sleep(0.1)
        for task in tasks:
            if task.done() and (error := task.exception()) is not None:
                raise error
        if self.loop.errors:
            return
        for client in self.clients:
            self._judge(client)
        await self._audit_end()

    def _judge(self, client: Client) -> None:
        verdict = client.verdict(self.oracle, range(NUMBERS))
        self.monitor.check()
        if verdict is Verdict.FAILED and not self._is_excused(client):
            raise Violation(f"request {client.ask.number} was answered with {client.code}: {client.error}")

    def _is_excused(self, client: Client) -> bool:
        """Return whether faults explain an error by the rules of the router: more losses than attempts, no
        replica that was there all the time, too many requests for the replicas that were, or none with the
        weights that a stream began with. No other error is ever excused."""
        felt = [
            strike.fault
            for strike in self.struck
            if strike.fault.at <= (client.ended or 0.0) and client.begun <= strike.until + RECOVERY
        ]
        failed = Counter(fault.machine for fault in felt if fault.kind in ("device", "device_read"))
        lost = [fault.machine for fault in felt if fault.kind in LOSSES]
        lost += [machine for machine, count in failed.items() if count >= MAX_FAILURES]
        cuts = [fault.machine for fault in felt if fault.kind == "cut"]
        match client.code:
            case "replica_lost" if client.error == str(OTHER_REALM_ERROR):
                return client.ask.stream and self._has_mixed(client) and bool(lost + cuts)
            case "replica_lost" | "unavailable":  # a cut parts any two machines
                return len(lost + cuts) > MOST_LOSSES or len({*lost}) + len(cuts) >= len(self.replicas)
            case "too_many_requests":
                return bool(lost + cuts)
        return False

    def _has_mixed(self, client: Client) -> bool:
        """Return whether replicas had different weights before a request ended."""
        others = [strike.fault.at for strike in self.struck if strike.fault.kind == "other_weights"]
        return self.is_mixed or any(at <= (client.ended or 0.0) for at in others)

    def trace(self) -> str:
        """Return a hash of all answers and times, but not of their random ids and dates."""
        ended = [(c.ask.number, c.status, c.ended, len(c.data)) for c in self.clients]
        return hashed(self.loop, ended)

    async def _audit_end(self) -> None:
        """All requests have ended: everything that they held is free again."""
        await asyncio.sleep(2.0)
        self.health.close()
        if self.line.num_waiting or self.proxy.num_in_flight:
            raise Violation(f"{self.line.num_waiting} requests wait in the router")
        for own in self.routed:
            if own.requests or own.load or own.connections:
                counts = f"{len(own.requests)} requests, load {own.load}, {len(own.connections)} connections"
                raise Violation(f"{own}: {counts}")
        for replica in self.replicas:
            if replica.session.subscriptions:
                raise Violation(f"{replica.host}: {len(replica.session.subscriptions)} requests are left")
            while self.loop.time() < LIMIT and not replica.machine.mover.is_idle:
                await asyncio.sleep(0.2)
            audit_end(replica.machine)

"""The schedule of faults: kills, and between two of them a pause or a replacement of weights."""

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

from benchmarks.soak.fleet import ENGINES, KILLED, Fleet
from benchmarks.soak.models import WEIGHTS

CALM = ("pause", "wait", "pause", "keep")  # between two kills, in turn; the modes are of replaced weights
PAUSE = 1.5  # seconds


@dataclass(frozen=True)
class Fault:
    """A fault. at: seconds of the run; seconds: until the service was complete again."""

    at: float
    kind: str
    server: str
    seconds: float


class Faults:
    """Applies one fault at a time; the next one waits until the last one's server is ready."""

    def __init__(self, fleet: Fleet, seed: int, every: float):
        self.fleet, self.every, self.done = fleet, every, list[Fault]()
        self._chance = random.Random(f"{seed} faults")
        self._victims = deck(KILLED, self._chance)

    async def run(self, until: float) -> None:
        begun = time.monotonic()
        tick = begun + self.every / 2
        for calm in cycle(CALM):
            for kind in ("kill", calm):
                await asyncio.sleep(max(0.0, tick - time.monotonic()))
                if time.monotonic() >= until:
                    return
                at = time.monotonic()
                server = await self._apply(kind)
                self.done.append(Fault(at - begun, kind, server, time.monotonic() - at))
                tick = max(tick + self.every / 2, time.monotonic())

    async def _apply(self, kind: str) -> str:
        """Apply a fault, and return the server that it struck."""
        fleet = self.fleet
        if kind == "kill":
            victim = next(self._victims)
            await fleet.kill(victim)
            return victim
        if kind == "pause":
            victim = self._chance.choice(ENGINES)
            await fleet.pause(victim, PAUSE, clear=self._chance.random() < 0.5)
            return victim
        (other,) = WEIGHTS.keys() - {fleet.weights}
        await fleet.replace(other, mode=kind)
        return "all engines"


def deck(names: tuple[str, ...], chance: random.Random) -> Iterator[str]:
    """Yield names in a random order, each as often as the others."""
    while True:
        yield from chance.sample(names, len(names))

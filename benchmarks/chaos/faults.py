"""Schedules of faults, drawn from a seed: what happens, where and when. A schedule can be run without some of
its faults, which is how a failing one is shrunk."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

DISK = "full", "broken", "slow"  # states of a disk that last a while
LOCAL = *DISK, "device", "device_read", "rot", "clock"  # of one machine, whose process goes on
ENGINE = (
    *DISK,
    "rot",
    "device",
    "device_read",
    "weights",
    "sleep",
    "kill",
    "stop",
    "power",
    "old_disk",
    "clock",
)
PREFILL = "prefill_device", "prefill_kill", "prefill_weights", "silence", "hang_up"
FLEET = (
    *DISK,
    "rot",
    "device",
    "device_read",
    "kill",
    "kill",
    "power",
    "old_disk",
    "other_weights",
    "cut",
    "cut",
    "cut_off",
    "drain",
    "pause",
    "clock",
)


@dataclass(frozen=True)
class Fault:
    """A fault that begins at a time and lasts `seconds`; `number` seeds what it draws."""

    at: float
    kind: str
    machine: int
    seconds: float
    number: int

    def __str__(self) -> str:
        lasting = f" for {self.seconds:.2f} s" if self.seconds else ""
        return f"{self.at:7.3f} s  {self.kind} on machine {self.machine}{lasting}"


def drawn(random: Random, kinds: Sequence[str], most: int, machines: int, until: float) -> list[Fault]:
    """Draw up to `most` faults of some of the kinds (a seed that draws few of them goes deeper)."""
    chosen = random.sample(list(dict.fromkeys(kinds)), random.randint(1, len(set(kinds))))
    faults = [
        Fault(
            at=round(random.random() * until, 3),
            kind=random.choice(chosen),
            machine=random.randrange(machines),
            seconds=round(random.random() * 2.0, 3),
            number=random.randrange(1 << 30),
        )
        for _ in range(random.randint(0, most))
    ]
    return sorted(faults, key=lambda fault: fault.at)

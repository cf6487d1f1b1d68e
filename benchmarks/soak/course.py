"""The course of a run: the load, the faults and the probe side by side."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.soak.answers import Answer
from benchmarks.soak.asks import Ask, ask
from benchmarks.soak.clients import Clients, FirstToken
from benchmarks.soak.faults import Fault, Faults
from benchmarks.soak.fleet import Fleet, traces
from benchmarks.soak.oracle import Wanted, alone
from benchmarks.soak.probe import Probe

IDLE = 3.0  # seconds after the last answer; then engines have no requests
SHOWN = 60.0  # seconds between two lines on the terminal


@dataclass(frozen=True)
class Setting:
    """The options of a run.

    kill_every: seconds between two kills
    requests: number of different requests
    clients: number of clients; think: mean seconds between an answer and a client's next request
    """

    minutes: float
    kill_every: float
    seed: int
    requests: int
    clients: int
    think: float


@dataclass
class Course:
    """What happened in a run: samples of the probe, faults, times to first tokens, counts of answers.

    joined: answers of two sets of weights
    codes: exit codes of the servers, which were drained at the end
    orphans: processes that killed servers have left behind
    traces: logs with a traceback
    """

    lines: list[dict[str, Any]]
    faults: list[Fault]
    firsts: list[FirstToken]
    done: Counter[str]
    kinds: Counter[str]
    joined: list[Answer]
    codes: dict[str, int]
    orphans: int
    traces: list[str]


async def run(folder: Path, setting: Setting) -> Course:
    """Run the fleet of a folder with models and adapters."""
    fleet = Fleet(folder)
    try:
        asks = [ask(setting.seed, number) for number in range(setting.requests)]
        print(f"{setting.requests} requests alone, with each set of weights", flush=True)
        wanted = await alone(fleet, asks)
        print("the fleet starts", flush=True)
        await fleet.start()
        return await loaded(fleet, asks, wanted, setting)
    finally:
        fleet.end()


async def loaded(fleet: Fleet, asks: Sequence[Ask], wanted: Wanted, setting: Setting) -> Course:
    folder = fleet.folder
    clients = Clients(fleet, asks, wanted, folder / "failures.jsonl", setting.seed, setting.think)
    faults = Faults(fleet, setting.seed, setting.kill_every)
    probe = Probe(fleet, clients, folder / "samples.jsonl")
    until = time.monotonic() + 60 * setting.minutes
    async with asyncio.TaskGroup() as group:
        for part in (clients.run(setting.clients, until), faults.run(until), probe.run(until)):
            group.create_task(part)
        group.create_task(shown(clients, faults, until))
    await asyncio.sleep(IDLE)
    await probe.line(60 * setting.minutes + IDLE)
    left, codes = await fleet.left(), await fleet.stop()
    logs = sorted((folder / "logs").iterdir())
    return Course(
        probe.lines,
        faults.done,
        clients.firsts,
        clients.done,
        clients.kinds,
        clients.joined,
        codes,
        left,
        traces(logs),
    )


async def shown(clients: Clients, faults: Faults, until: float) -> None:
    """Print the counts once a minute."""
    begun = time.monotonic()
    while (left := until - time.monotonic()) > 0:
        await asyncio.sleep(min(SHOWN, left))
        counts = ", ".join(f"{name} {count}" for name, count in sorted(clients.done.items()))
        print(f"{time.monotonic() - begun:5.0f} s: {counts}; {len(faults.done)} faults", flush=True)

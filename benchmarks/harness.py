"""What every part shares: how much is measured, the engines' processes, runs in turns, and rows of
results."""

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engines import OURS, OURS_FREE, OURS_NARROW, VARIANTS, Setting
from benchmarks.traces import AZURE, MOONCAKE, Scale, TraceEntry, read
from benchmarks.worker import Worker, WorkerError

HIGHER_IS_BETTER = ("tokens/s", "requests/s")


@dataclass(frozen=True)
class Row:
    """One figure of one engine, once a round; `faster` says how many times as fast engines of ours were in
    the same rounds."""

    part: str
    what: str
    engine: str
    unit: str
    values: list[float]
    faster: dict[str, float] = field(default_factory=dict)

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True)
class Amount:
    """How much is measured."""

    programs: tuple[str, ...] = ("decode", "prefill", "startup")  # parts of `duetto bench`
    rounds: int = 5
    steps: int = 8
    widths: tuple[int, ...] = (1, 8, 32)
    contexts: tuple[int, ...] = (128, 512)
    lengths: tuple[int, ...] = (64, 128, 256, 512)
    requests: int = 200
    runs: int = 2  # of a whole workload by each engine
    pilot: int = 8  # requests that choose a peer's dtype
    loads: tuple[float, ...] = (0.3, 0.5, 0.7, 0.9)
    load_requests: int = 60
    prefix_requests: int = 60
    waiting: tuple[int, ...] = (10, 1000, 100_000)
    questions: int = 16
    minutes: float = 1.0


QUICK = Amount(
    programs=("prefill",), rounds=2, steps=4, widths=(1, 8), contexts=(128,), lengths=(128,),
    requests=24, runs=1, pilot=4, loads=(0.5,), load_requests=12, prefix_requests=12, waiting=(10, 10_000),
    questions=4, minutes=0.1,
)  # fmt: skip


@dataclass
class Bench:
    """A model's folder, what is measured of it, and the engines that are running."""

    folder: Path
    amount: Amount
    engines: Sequence[str]
    scale: Scale
    seats: int = 32
    ttft_limit: float = 2.0  # seconds, for p99
    tpot_limit: float = 0.2
    azure: Path = AZURE
    mooncake: Path = MOONCAKE
    workers: dict[str, Worker] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def config(self) -> dict[str, Any]:
        return json.loads((self.folder / "config.json").read_text())

    @property
    def vocabulary(self) -> int:
        return self.config["vocab_size"]

    @property
    def setting(self) -> Setting:
        """Room for the longest request of the trace and for decode at the longest context."""
        decode = max(self.amount.contexts) + (self.amount.rounds + 1) * (2 * self.amount.steps + 1)
        longest = -(-max(decode, self.scale.prompt + self.scale.output) // 128) * 128
        return Setting(self.seats, min(longest, self.config["max_position_embeddings"]))

    def entries(self, count: int) -> list[TraceEntry]:
        """The first lines of the Azure trace, scaled."""
        return [self.scale(entry) for entry in read(self.azure)[:count]]

    def chosen(self, *names: str) -> list[str]:
        """Of these engines, or of all, those that are to be measured; a name stands for its dtypes too."""
        return [e for e in self.engines if not names or e in names or e.rpartition(" ")[0] in names]

    def worker(self, name: str) -> Worker:
        if name not in self.workers:
            self.workers[name] = Worker(name, self.folder, self.setting)
        return self.workers[name]

    def without(self, name: str, error: Exception) -> None:
        """Leave an engine out from now on, and say so."""
        self.note(f"{name} is left out: {error}")
        self.engines = [engine for engine in self.engines if engine != name]
        self.workers.pop(name, None)

    def note(self, text: str) -> None:
        print(f"  ({text})", flush=True)
        self.notes.append(text)

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()
        self.workers.clear()

    def in_turns(
        self, engines: Iterable[str], rounds: int, measure: Callable[[Worker], Any], warm: bool = False
    ) -> dict[str, list[Any]]:
        """What `measure` returns for each engine in each round: A B C, A B C, ... An engine that fails is
        left out."""
        found: dict[str, list[Any]] = {engine: [] for engine in engines}
        for i in range(rounds + warm):
            for engine in list(found):
                try:
                    value = measure(self.worker(engine))
                except (WorkerError, BrokenPipeError) as error:
                    self.without(engine, error)
                    del found[engine]
                else:
                    found[engine] += [value] if i >= warm else []
        return found


@contextmanager
def own_workers(
    bench: Bench, settings: dict[str, Setting], engine: str = OURS
) -> Iterator[dict[str, Worker]]:
    """One engine of ours with several options, each under a name of its own, for as long as a part needs
    them; all others end first."""
    bench.close()
    workers = {name: Worker(engine, bench.folder, setting) for name, setting in settings.items()}
    try:
        yield workers
    finally:
        for worker in workers.values():
            worker.close()


def rows_of(
    part: str,
    what: str,
    unit: str,
    found: dict[str, list[float]],
    references: Sequence[str] = (OURS, OURS_NARROW, OURS_FREE),
) -> Iterator[Row]:
    """A row for each engine, with the ratios of its rounds to those of the engines that are references."""
    for engine, values in found.items():
        faster = {
            name: statistics.median(
                speed(unit, own, theirs) for own, theirs in zip(found[name], values, strict=True)
            )
            for name in references
            if name in found and name != engine
        }
        yield Row(part, what, engine, unit, values, faster)


def speed(unit: str, own: float, other: float) -> float:
    """How many times as fast as the other the first is."""
    return own / other if unit in HIGHER_IS_BETTER else other / own


def installed() -> tuple[list[str], list[str]]:
    """Names of the engines that can run here, and the packages that others lack."""
    here = [name for name, variant in VARIANTS.items() if variant.installed]
    return here, sorted({v.needs for name, v in VARIANTS.items() if name not in here})

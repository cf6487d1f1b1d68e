"""A fleet in simulated time under seeded faults.

python -m benchmarks.chaos --seeds 10000 --minutes 30     # as many as there is time for
python -m benchmarks.chaos --first 4711 --seeds 1         # one seed again
python -m benchmarks.chaos --plant "torn page"            # which seed finds a planted fault
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.chaos.planted import PLANTED, found_by
from benchmarks.chaos.run import Outcome, run, shrunk


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m benchmarks.chaos", description="Play seeded faults in simulated time.", allow_abbrev=False
    )
    p.add_argument("--seeds", type=int, default=200, help="number of seeds (default: 200)")
    p.add_argument("--first", type=int, default=0, help="first seed (default: 0)")
    p.add_argument(
        "--minutes", type=float, default=30.0, help="time after which no seed begins (default: 30)"
    )
    p.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    p.add_argument(
        "--plant", choices=[*PLANTED, "all"], help="plant a fault, and name the seed that finds it"
    )
    p.add_argument("--output", type=Path, help="file for the figures")
    return p


def outcomes(seeds: range, workers: int, minutes: float) -> Iterator[Outcome]:
    """Yield the outcomes of seeds while there is time."""
    end = time.monotonic() + 60 * minutes
    if workers == 1:
        for seed in seeds:
            if time.monotonic() < end:
                yield run(seed)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for outcome in pool.imap(run, seeds, chunksize=4):
            yield outcome
            if time.monotonic() > end:
                return


def replayed(seed: int) -> str:
    """Return the fewest faults with which a seed fails, and how."""
    outcome = shrunk(seed)
    faults = "\n".join(f"    {fault}" for fault in outcome.faults) or "    without faults"
    return f"seed {seed} ({outcome.kind}): {outcome.error}\n{faults}\n{outcome.log}"


def plant(names: list[str], seeds: range) -> int:
    missed = 0
    for name in names:
        seed = found_by(name, seeds)
        missed += seed is None
        print(
            f"{name}: {'not found' if seed is None else f'seed {seed}'}  ({PLANTED[name].about})", flush=True
        )
    return missed


def main() -> int:
    options = parser().parse_args()
    seeds = range(options.first, options.first + options.seeds)
    if options.plant is not None:
        return plant([*PLANTED] if options.plant == "all" else [options.plant], seeds)
    begun, count, events, asks, failed = time.monotonic(), Counter[str](), 0, 0, list[int]()
    faults = Counter[str]()
    for outcome in outcomes(seeds, options.workers, options.minutes):
        count[outcome.kind] += 1
        events, asks = events + outcome.events, asks + outcome.asks
        faults.update(fault.kind for fault in outcome.faults)
        if outcome.error:
            failed.append(outcome.seed)
            print(replayed(outcome.seed), flush=True)
    seconds = time.monotonic() - begun
    found = {
        "seeds": dict(count),
        "requests": asks,
        "faults": dict(sorted(faults.items())),
        "events": events,
        "seconds": round(seconds, 1),
        "events_per_second": round(events / seconds),
        "failed": failed,
    }
    text = json.dumps(found, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(f"{text}\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())

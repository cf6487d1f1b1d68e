"""A fleet in simulated time under seeded faults.

python -m benchmarks.chaos --seeds 10000 --minutes 30     # as many as there is time for
python -m benchmarks.chaos --seeds 10000 --output FILE    # and again, until FILE has them all
python -m benchmarks.chaos --first 4711 --seeds 1         # one seed again
python -m benchmarks.chaos --plant "torn page"            # which seed finds a planted fault
"""

import argparse
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.chaos.planted import PLANTED, found_by
from benchmarks.chaos.run import Outcome, run, shrunk


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m benchmarks.chaos", description="Play seeded faults in simulated time.", allow_abbrev=False
    )
    p.add_argument("--seeds", type=int, default=200, help="number of seeds (default: 200)")
    p.add_argument("--first", type=int, help="first seed (default: the one after those in --output, or 0)")
    p.add_argument(
        "--minutes", type=float, default=30.0, help="time after which no seed begins (default: 30)"
    )
    p.add_argument("--workers", type=int, default=1, help="processes (default: 1)")
    p.add_argument(
        "--plant", choices=[*PLANTED, "all"], help="plant a fault, and name the seed that finds it"
    )
    p.add_argument(
        "--output", type=Path, help="file for the figures, which are added to those of the seeds there"
    )
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


def figures(played: Iterator[Outcome]) -> dict[str, Any]:
    """Count what has happened, and print each seed that fails."""
    begun, count, faults = time.monotonic(), Counter[str](), Counter[str]()
    found: dict[str, Any] = {"seeds": count, "requests": 0, "faults": faults, "events": 0, "failed": []}
    for outcome in played:
        count[outcome.kind] += 1
        found["events"] += outcome.events
        found["requests"] += outcome.asks
        faults.update(fault.kind for fault in outcome.faults)
        if outcome.error:
            found["failed"].append(outcome.seed)
            print(replayed(outcome.seed), flush=True)
    return found | {"seconds": round(time.monotonic() - begun, 1)}


def merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Add the figures of two runs."""
    counts = {
        name: dict(sorted((Counter(one[name]) + Counter(other[name])).items()))
        for name in ("seeds", "faults")
    }
    return {name: one[name] + other[name] for name in other if name not in counts} | counts


def main() -> int:
    options = parser().parse_args()
    before = None
    if options.output is not None and options.output.exists():
        before = json.loads(options.output.read_text())
    done = sum(before["seeds"].values()) if before else 0
    first = options.first if options.first is not None else done
    seeds = range(first, options.seeds if options.first is None else first + options.seeds)
    if options.plant is not None:
        return plant([*PLANTED] if options.plant == "all" else [options.plant], seeds)
    found = figures(outcomes(seeds, options.workers, options.minutes))
    whole = merged(before or dict.fromkeys(found, 0) | {"seeds": {}, "faults": {}, "failed": []}, found)
    text = json.dumps(whole, indent=1)
    print(text)
    if options.output is not None:
        options.output.write_text(f"{text}\n")
    return bool(found["failed"])


if __name__ == "__main__":
    sys.exit(main())

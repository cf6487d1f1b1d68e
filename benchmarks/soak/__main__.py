"""Real servers under a mixed load, of which one process is killed every half minute.

python -m benchmarks.soak --minutes 60                   # the figures go to benchmarks/results
python -m benchmarks.soak --minutes 2 --requests 45 --output /tmp/soak.json
python -m benchmarks.soak --replay failures.jsonl        # the requests of failures again, each alone
"""

import argparse
import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from datetime import date
from pathlib import Path

from benchmarks.arguments import existing, new_folder, number, output
from benchmarks.report import ROOT
from benchmarks.soak import models
from benchmarks.soak.asks import Ask
from benchmarks.soak.course import Setting, run
from benchmarks.soak.fleet import Fleet
from benchmarks.soak.oracle import alone
from benchmarks.soak.plot import plot
from benchmarks.soak.proof import missing, prove
from benchmarks.soak.report import machine, result


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m benchmarks.soak", description="Load and kill real servers.", allow_abbrev=False
    )
    above_zero = number(float, 0, but=0)
    p.add_argument("--minutes", type=above_zero, default=60.0, help="length of the load (default: 60)")
    p.add_argument(
        "--kill-every", type=above_zero, default=30.0, help="seconds between two kills (default: 30)"
    )
    p.add_argument("--seed", type=number(int, 0), default=0, help="seed of requests and faults (default: 0)")
    p.add_argument(
        "--requests", type=number(int, 1), default=180, help="number of different requests (default: 180)"
    )
    p.add_argument("--clients", type=number(int, 1), default=16, help="number of clients (default: 16)")
    p.add_argument(
        "--think",
        type=number(float, 0),
        default=1.5,
        help="mean seconds before a client's next request (default: 1.5)",
    )
    p.add_argument("--folder", type=new_folder, help="new folder for models, logs and samples; it is kept")
    p.add_argument("--output", type=output, help="file of the result (default: in benchmarks/results)")
    p.add_argument("--replay", type=existing, help="failures.jsonl of a run, whose requests are sent alone")
    return p


def replay(file: Path, folder: Path) -> int:
    """Print whether the requests of failures have the wanted answers alone, and return 0 if all have."""
    failures = [json.loads(line) for line in file.read_text().splitlines()]
    asks = [Ask(i, one["kind"], one["path"], one["body"]) for i, one in enumerate(failures)]
    fleet = Fleet(folder)
    try:
        again = asyncio.run(alone(fleet, asks))
    finally:
        fleet.end()
    others = 0
    for i, failure in enumerate(failures):
        for weights, wanted in failure["wanted"].items():
            equal = again[weights][i].record() == wanted
            others += not equal
            print(f"line {i + 1}, {weights} weights: {'as wanted' if equal else 'another answer'}")
    return bool(others)


def main() -> int:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the servers are ended too
    options, today = parser().parse_args(), date.today().isoformat()
    about = machine(today)
    setting = Setting(
        options.minutes, options.kill_every, options.seed, options.requests, options.clients, options.think
    )
    file = options.output or ROOT / "benchmarks" / "results" / f"{today}-cpu-soak.json"
    folder = options.folder or Path(tempfile.mkdtemp(prefix="duetto-soak-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"models, logs and samples: {folder}", flush=True)
    models.write(folder)
    if options.replay is not None:
        return replay(options.replay, folder)
    course = asyncio.run(run(folder, setting))
    print("the audit logs are verified", flush=True)
    found = result(course, setting, prove(folder), missing(folder, course.joined), about)
    file.write_text(json.dumps(found, indent=1) + "\n")
    title = f"{setting.minutes:g} minutes, {len(course.faults)} faults, {course.done['answers']} answers"
    plot(course, title, file.with_suffix(".svg"))
    print(json.dumps({name: value for name, value in found.items() if name != "minutes"}, indent=1))
    print("\n".join(found["violations"]) or "no violation", flush=True)
    if not found["violations"] and options.folder is None:
        shutil.rmtree(folder)
    return bool(found["violations"])


if __name__ == "__main__":
    sys.exit(main())

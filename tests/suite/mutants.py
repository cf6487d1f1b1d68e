"""Measures what the tests prove: changes one place of the library at a time and runs the tests that reach it.

`make mutants` needs the contexts that `make coverage` records. Each mutant is tested in a copy of the
repository. A run that is interrupted goes on where it was: build/mutants keeps the outcomes.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from queue import Queue
from signal import SIGKILL

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from coverage import CoverageData
from suite.groups import recorded
from suite.mutations import Mutant, draw_mutants, find_mutants

FOLDERS = ("model", "kvcache", "sampling", "checkpoints", "serve", "src/duetto")
PLACE = ROOT / "build" / "mutants"
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "build", "dist", "__pycache__", ".coverage*", "*_cache")
FIRST_TESTS = 24  # of a mutant's tests, before the others are collected
MAX_SECONDS = 900  # of one run of tests
DEVICES = "--xla_force_host_platform_device_count=4"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """A mutant's end.

    state: killed, survived, or unreached where no test runs the line
    test: the test that failed; empty if none did
    is_quick: whether that test is one of `make test`
    tests: how many reach the line
    seconds: of all runs
    """

    state: str
    test: str = ""
    is_quick: bool = False
    tests: int = 0
    seconds: float = 0.0


@dataclass
class Measurement:
    """Tests mutants in copies of the repository."""

    coverage: CoverageData
    copies: Queue[Path] = field(default_factory=Queue)
    has_repetitions: bool = True
    costs: dict[str, float] = field(default_factory=recorded)
    passes: dict[str, bool] = field(default_factory=dict)  # tests that failed, without a mutant

    def reaching(self, mutant: Mutant) -> list[str]:
        """Return the tests that run a mutant's line, cheapest first and one of each file before others.

        A line that runs when its module is imported is reached by the tests of all of the module's lines.
        """
        lines = self.coverage.contexts_by_lineno(str(ROOT / mutant.file))
        tests = set(lines.get(mutant.line, ())) - {""}
        if "" in lines.get(mutant.line, ()):
            tests = {test for contexts in lines.values() for test in contexts} - {""}
        order, turns = [], Counter[str]()
        for test in sorted(tests):
            file = test.partition("::")[0]
            order.append((turns[file], self.costs.get(file, 1.0), test))
            turns[file] += 1
        return [test for *_, test in sorted(order)]

    def measure(self, mutant: Mutant) -> Outcome:
        """Test a mutant in a copy that is free, and note the outcome."""
        copy, start = self.copies.get(), time.monotonic()
        try:
            outcome = self.judge(copy, mutant, self.reaching(mutant))
        finally:
            self.copies.put(copy)
        outcome = replace(outcome, seconds=round(time.monotonic() - start, 1))
        with (PLACE / "outcomes.jsonl").open("a") as journal:
            journal.write(json.dumps({"key": mutant.key, **asdict(outcome)}) + "\n")
        print(f"{outcome.state:9} {outcome.seconds:6.1f} s  {mutant.key}  {outcome.test[:120]}", flush=True)
        return outcome

    def judge(self, copy: Path, mutant: Mutant, tests: Sequence[str]) -> Outcome:
        """Run the tests of `make test` that reach a mutant, then their repetitions, until one fails.

        A test counts only if it passes without the mutant.
        """
        rounds = (tests[:FIRST_TESTS], ()), (tests[FIRST_TESTS:], ()), (tests, ("--full", "-m", "full"))
        for group, flags in rounds if self.has_repetitions else rounds[:2]:
            remaining = list(group)
            while remaining and (test := run_tests(copy, remaining, flags, mutant)) is not None:
                if test in remaining and test not in self.passes:
                    self.passes[test] = run_tests(copy, [test], ["--full"]) is None
                if self.passes.get(test, True):
                    return Outcome("killed", test, not flags, len(tests))
                remaining.remove(test)
        return Outcome("survived" if tests else "unreached", tests=len(tests))


def run_tests(
    copy: Path, tests: Sequence[str], flags: Sequence[str], mutant: Mutant | None = None
) -> str | None:
    """Run tests in a copy, with a mutant if there is one.

    Returns the first test that fails, or how the run ended if no test failed; None if all pass.
    """
    file = copy / (mutant.file if mutant else "README.md")
    source = file.read_bytes()
    file.write_bytes(mutant.apply(source) if mutant else source)
    try:
        on_devices = [test for test in tests if test.startswith("tests/devices/")]
        others = [test for test in tests if not test.startswith("tests/devices/")]
        return run_pytest(copy, others, flags, "") or run_pytest(copy, on_devices, flags, DEVICES)
    finally:
        file.write_bytes(source)


def run_pytest(copy: Path, tests: Sequence[str], flags: Sequence[str], xla_flags: str) -> str | None:
    """Run tests of one number of devices, in a process with a cache of its own, until one fails."""
    if not tests:
        return None
    cache, names = copy / "build" / "cache", copy / "build" / "tests.txt"
    shutil.rmtree(cache, ignore_errors=True)
    shutil.copytree(PLACE / "programs", cache / "duetto", copy_function=os.link)
    names.write_text("\n".join(tests))
    paths = f"{copy / 'src'}{os.pathsep}{copy / 'tests'}"
    more = {"PYTHONPATH": paths, "XDG_CACHE_HOME": str(cache), "XLA_FLAGS": xla_flags, "JAX_PLATFORMS": "cpu"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-xq",
        "-p",
        "no:cacheprovider",
        "-n",
        "0",
        *flags,
        f"@{names}",
    ]
    process = subprocess.Popen(
        command, cwd=copy, env={**os.environ, **more}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=MAX_SECONDS)
    except subprocess.TimeoutExpired:
        return f"no end after {MAX_SECONDS} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, SIGKILL)  # with what it has started
        process.wait()
    if process.returncode in (0, 5):  # 5: the flags select none of them
        return None
    failure = FAILED.search(output)
    return failure[1] if failure else f"pytest ended with {process.returncode}: {output[-300:]}"


def prepare_copy(number: int) -> Path:
    copy = PLACE / f"copy{number}"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(ROOT, copy, symlinks=True, ignore=NOT_COPIED)
    (copy / "build").mkdir()
    return copy


def folder_of(file: str) -> str:
    """Return the folder under which a file's mutants are counted: a door of serve/, or a top folder."""
    top, below, *_ = file.split("/")
    return f"{top}/{below}" if top in ("serve", "src") and "." not in below else top


def table(outcomes: dict[str, Outcome]) -> Iterator[str]:
    """Yield the lines of a table by folder, and the mutants that no test kills."""
    counts = defaultdict[str, Counter[str]](Counter)
    for key, outcome in outcomes.items():
        for folder in (folder_of(key.partition(":")[0]), "all"):
            counts[folder].update(["drawn", outcome.state, *(["quick"] if outcome.is_quick else [])])
    yield f"{'folder':16} {'drawn':>6} {'killed':>7} {'by make test':>13} {'survived':>9} {'unreached':>10}"
    for folder, n in sorted(counts.items(), key=lambda item: (item[0] == "all", item[0])):
        numbers = f"{n['drawn']:6} {n['killed']:7} {n['quick']:13} {n['survived']:9} {n['unreached']:10}"
        yield f"{folder:16} {numbers}"
    yield from (f"{outcome.state} {key}" for key, outcome in outcomes.items() if outcome.state != "killed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--folders", nargs="*", default=list(FOLDERS), help="mutants of files below these")
    parser.add_argument("--quick", action="store_true", help="without the repetitions")
    parser.add_argument("--out", type=Path, help="JSON file of the outcomes")
    arguments = parser.parse_args()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "duetto"
    shutil.copytree(cache, PLACE / "programs", dirs_exist_ok=True)
    data = CoverageData(str(ROOT / ".coverage"))
    measurement = Measurement(data, has_repetitions=not arguments.quick)
    measurement.coverage.read()
    for number in range(arguments.workers):
        measurement.copies.put(prepare_copy(number))
    files = sorted({file.resolve() for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")})
    mutants = [
        x for file in files for x in find_mutants(ROOT, file) if x.file.startswith(tuple(arguments.folders))
    ]
    drawn = draw_mutants(mutants, folder_of, arguments.count, arguments.seed)
    journal = PLACE / "outcomes.jsonl"
    entries = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    outcomes = {entry.pop("key"): Outcome(**entry) for entry in entries}
    waiting = [mutant for mutant in drawn if mutant.key not in outcomes]
    with ThreadPoolExecutor(arguments.workers) as pool:
        outcomes |= dict(zip([x.key for x in waiting], pool.map(measurement.measure, waiting), strict=True))
    outcomes = {mutant.key: outcomes[mutant.key] for mutant in drawn}
    print(*table(outcomes), sep="\n")
    if arguments.out:
        facts = {"seed": arguments.seed, "date": datetime.now(UTC).date().isoformat()}
        records = {key: asdict(outcome) for key, outcome in outcomes.items()}
        arguments.out.write_text(json.dumps({**facts, "mutants": records}, indent=1) + "\n")


if __name__ == "__main__":
    main()

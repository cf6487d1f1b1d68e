"""A pytest plugin that measures tests: CPU seconds, subprocesses included, and seconds on the clock.

Each run of many tests ends with the dearest ones. With `--costs FILE` the sums by file are written as JSON;
`python tests/suite/costs.py FILE...` prints them as a table by room.
"""

import json
import os
import platform
import re
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing import forkserver
from pathlib import Path

import pytest

DEAREST, MANY = 10, 100  # tests that are listed, of runs with at least MANY
STAMP = {"cpu": 0.0}  # CPU seconds of this process at the end of the last test


def cpu_seconds() -> float:
    """CPU seconds of this process, of the children that have ended, and of forked ones."""
    found = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in found) + fork_seconds()


def fork_seconds() -> float:
    """CPU seconds of the server that forks for `multiprocessing`, and of its children that have ended; 0 on a
    system that does not tell."""
    pid = vars(forkserver)["_forkserver"]._forkserver_pid
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # own and children's, user and system


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--costs", metavar="FILE", help="write CPU and clock seconds by file to FILE")


def pytest_collection_finish() -> None:
    STAMP["cpu"] = cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    """Note a test's CPU seconds in its last report, which travels from the worker to the controller."""
    report = yield
    if report.when == "teardown":
        now = cpu_seconds()
        report.cpu_seconds, STAMP["cpu"] = now - STAMP["cpu"], now
    return report


class Costs:
    """Seconds by test, gathered in the process that prints the summary."""

    def __init__(self, file: str | None):
        self.file, self.begin = file, time.perf_counter()
        self.tests: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        found = self.tests[re.sub(r"@[^\]]*$", "", report.nodeid)]  # xdist writes the group behind it
        found[0] += getattr(report, "cpu_seconds", 0.0)
        found[1] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self.tests) >= MANY:
            total = sum(cpu for cpu, _ in self.tests.values()) / 60
            terminalreporter.section(f"{DEAREST} dearest of {len(self.tests)} tests, {total:.1f} CPU minutes")
            for name, (cpu, wall) in sorted(self.tests.items(), key=lambda item: -item[1][0])[:DEAREST]:
                terminalreporter.write_line(f"{cpu:7.1f} s CPU {wall:7.1f} s  {name}")
        if self.file is not None:
            Path(self.file).write_text(json.dumps(self.record(), indent=1) + "\n")

    def record(self) -> dict[str, object]:
        """CPU and clock seconds and the number of tests, by file, dearest first."""
        files: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0])
        for name, (cpu, wall) in self.tests.items():
            own = files[name.partition("::")[0]]
            own[:] = own[0] + cpu, own[1] + wall, own[2] + 1
        dearest = sorted(files.items(), key=lambda item: -item[1][0])
        return {
            "python": platform.python_version(),
            "processor": platform.processor() or platform.machine(),
            "seconds": round(time.perf_counter() - self.begin, 1),
            "files": {
                file: {"cpu": round(c, 2), "wall": round(w, 2), "tests": n} for file, (c, w, n) in dearest
            },
        }


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Costs(config.getoption("--costs")), "costs of tests")


def table(files: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Lines of a table by room, and by file within a room, dearest first."""
    rooms: dict[str, dict[str, Mapping[str, float]]] = defaultdict(dict)
    for file, cost in files.items():
        rooms[str(Path(file).parent)][Path(file).name] = cost
    sums = {room: summed(own.values()) for room, own in rooms.items()}
    yield "   CPU s   wall s  tests"
    yield line(summed(sums.values()), "all")
    for room, cost in sorted(sums.items(), key=lambda item: -item[1]["cpu"]):
        yield line(cost, room)
        yield from (line(own, "  " + name) for name, own in rooms[room].items())


def summed(costs: Iterable[Mapping[str, float]]) -> dict[str, float]:
    found = list(costs)
    return {key: sum(cost[key] for cost in found) for key in ("cpu", "wall", "tests")}


def line(cost: Mapping[str, float], name: str) -> str:
    return f"{cost['cpu']:8.1f} {cost['wall']:8.1f} {cost['tests']:6.0f}  {name}"


if __name__ == "__main__":
    found: dict[str, Mapping[str, float]] = {}
    for file in sys.argv[1:]:
        found |= json.loads(Path(file).read_text())["files"]
    print(*table(found), sep="\n")

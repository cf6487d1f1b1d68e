"""A pytest plugin that parts the suite: which tests run, in which process, and in which order.

Tests of a group run in one process (`--dist loadgroup`), since they share engines: those of a file, of one
model of the invariance suite, of the one server, and those whose programs are compiled as users' are. Dear
groups begin first, by the costs that `make durations` has recorded; the others keep their order, in which
neighbours find each other's programs in the process.
"""

import faulthandler
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from suite.marks import is_repetition

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "benchmarks" / "results"
DEAR = 10.0  # CPU seconds of a group that would keep one worker busy at the end
MINUTES = 3600  # seconds, the limit of a test marked `minutes`
OF_A_WORKER = 6 << 30  # bytes of memory: programs and their caches take up to 5 GiB
MOST_WORKERS = 8  # each has threads for all cores
OF_A_CONTAINER = Path("/sys/fs/cgroup/memory.max")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the repetitions too, which are marked `full`")
    parser.addoption("--part", metavar="K/N", help="run part K, 0 to N-1, of N that cost about the same")
    parser.addoption("--cpu-kernels", action="store_true", help="engines use CPU kernels where they can")
    parser.addoption("--as-served", action="store_true", help="compile all programs as users' are")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Start a worker for each core, as many as memory holds: 2 to 8. A number in xdist's variable is left to
    xdist."""
    if os.environ.get("PYTEST_XDIST_AUTO_NUM_WORKERS"):
        return None
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(2, min(cores, memory() // OF_A_WORKER, MOST_WORKERS))


def memory() -> int:
    """Return the bytes of memory of the machine, or of the container."""
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(found, int(OF_A_CONTAINER.read_text()))
    except (OSError, ValueError):  # no control groups, or "max"
        return found


def pytest_configure(config: pytest.Config) -> None:
    """Forgive what other software leaves open: the collector finds it in any later test."""
    if "extras" in config.option.markexpr:
        config.addinivalue_line("filterwarnings", "ignore:unclosed:ResourceWarning")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if is_repetition(item, params_of(item)):
            item.add_marker(pytest.mark.full)
        if item.get_closest_marker("minutes"):
            item.add_marker(pytest.mark.timeout(MINUTES))
    deselect(config, items, "minutes", "minutes" in config.option.markexpr)
    deselect(config, items, "full", config.getoption("--full") or "full" in config.option.markexpr)
    costs = recorded()
    if (part := config.getoption("--part")) is not None:
        keep_part(config, items, costs, *map(int, part.split("/")))
    groups = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        groups[group_of(item)].append(item)
    for name, own in groups.items():
        for item in own:
            join_group(item, name)
    if config.getoption("numprocesses", None) or hasattr(config, "workerinput"):
        cost = {name: sum(costs.get(file_of(item), 0.0) for item in own) for name, own in groups.items()}
        order = sorted(groups, key=lambda name: -cost[name] if cost[name] >= DEAR else 0.0)
        items[:] = [item for name in order for item in groups[name]]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Lift the limit of stacks from tests of minutes, which have a limit of their own."""
    if item.get_closest_marker("minutes"):
        faulthandler.cancel_dump_traceback_later()


def join_group(item: pytest.Item, name: str) -> None:
    """Put a test into a group of xdist, which reads groups from the ends of ids."""
    item.add_marker(pytest.mark.xdist_group(name))
    if hasattr(item, "_id") and hasattr(item.config, "workerinput"):  # xdist 3.8 changes no id of pytest 9.2
        item._id = type(item._id).parse(f"{item.nodeid}@{name}")  # pyright: ignore[reportAttributeAccessIssue]


def deselect(config: pytest.Config, items: list[pytest.Item], mark: str, is_wanted: bool) -> None:
    """Leave out tests with a mark unless they are wanted."""
    if not is_wanted:
        left = [item for item in items if item.get_closest_marker(mark)]
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if not item.get_closest_marker(mark)]


def keep_part(
    config: pytest.Config, items: list[pytest.Item], costs: dict[str, float], index: int, count: int
) -> None:
    """Keep the tests of one of `count` parts. Tests of a file that share a process are in one part."""
    units = defaultdict[tuple[str, str], list[pytest.Item]](list)
    for item in items:
        units[file_of(item), group_of(item)].append(item)
    seconds = {unit: costs.get(unit[0], 1.0) * len(own) for unit, own in units.items()}
    parts = [list[tuple[str, str]]() for _ in range(count)]
    for unit in sorted(units, key=lambda unit: (-seconds[unit], unit)):
        min(parts, key=lambda part: sum(map(seconds.__getitem__, part))).append(unit)
    kept = {id(item) for unit in parts[index] for item in units[unit]}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = [item for item in items if id(item) in kept]


def served_model(item: pytest.Item) -> str | None:
    """The model of a row of the invariance suite."""
    return params_of(item).get("model") if item.path.name.startswith("test_invariance") else None


def params_of(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}  # pyright: ignore[reportAttributeAccessIssue]


def group_of(item: pytest.Item) -> str:
    """Name the tests with which one shares a process."""
    if (model := served_model(item)) is not None:
        return f"invariance of {model}"
    if "server" in getattr(item, "fixturenames", ()):
        return "a server"
    if not item.get_closest_marker("as_served"):
        return file_of(item)
    if item.get_closest_marker("extras"):  # programs for devices that are absent, which nothing shares
        return f"{file_of(item)} {params_of(item).get('name', '')}"
    return "as served"


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def recorded() -> dict[str, float]:
    """CPU seconds of a test on average, by file, as they were recorded."""
    found: dict[str, float] = {}
    for place in RECORDED.glob("suite*.json"):
        files = json.loads(place.read_text())["files"]
        found |= {name: cost["cpu"] / cost["tests"] for name, cost in files.items()}
    return found

"""The result of a run: its criteria, a row for each minute, and the machine."""

import os
import platform
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from benchmarks.report import PACKAGES, commit, cpu, version_of
from benchmarks.soak.clients import FirstToken
from benchmarks.soak.course import Course, Setting
from benchmarks.soak.fleet import ENGINES, KILLED, NEVER_KILLED
from benchmarks.soak.probe import TOTALS, ttft
from benchmarks.soak.proof import Proof

SETTLED = 600.0  # seconds, at most half of a run: caches fill and programs are loaded before
SPAN = 120.0  # seconds whose median is compared
AGE = 60.0, 80.0  # seconds of a life at which the resident sets of killed processes are compared
MOST_GROWTH = 3.0  # percent
LONG = 30.0  # minutes; in a shorter run the growth is reported, and no criterion
GROWING = ("rss_mib", "descriptors", "threads")
SHOWN = ("rss_mib", "descriptors", "threads", "pages")
Line = Mapping[str, Any]


def result(
    course: Course, setting: Setting, proofs: Mapping[str, Proof], missing: int, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of a result file. `missing`: number of answers of two sets of weights that no log
    has; `about`: the machine and the versions, from before the run."""
    found = {
        "about": {**about, "setting": asdict(setting)},
        "answers": answers(course) | {"in_no_log": missing},
        "faults": faults(course),
        "left": left(course),
        "growth": growth(course.lines),
        "time_to_first_token": halves(course),
        "totals": totals(course.lines),
        "busy_cores": round(busy(course.lines), 2),
        "audit": {name: {"proved": proof.proved} | asdict(proof) for name, proof in proofs.items()},
    }
    found["violations"] = violations(found, setting, proofs)
    return found | {"minutes": minutes(course)}


def machine(today: str) -> dict[str, Any]:
    versions = {package: version_of(package) for package in PACKAGES}
    return {
        "date": today,
        "model": "demo, float32",
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: text for package, text in versions.items() if text},
        "commit": commit(),
    }


def answers(course: Course) -> dict[str, Any]:
    """Return the counts: right answers, right ones that clients have cut, wrong and lost ones, requests that
    were sent again since their router was killed, and right ones of two sets of weights."""
    names = ("answers", "cut", "wrong", "lost", "sent again")
    kinds = dict(sorted(course.kinds.items()))
    counts = {name.replace(" ", "_"): course.done[name] for name in names}
    return counts | {"of_two_weights": len(course.joined), "kinds": kinds}


def faults(course: Course) -> dict[str, Any]:
    kills = Counter(fault.server for fault in course.faults if fault.kind == "kill")
    others = Counter(fault.kind for fault in course.faults if fault.kind != "kill")
    back = [fault.seconds for fault in course.faults if fault.kind == "kill"]
    return {
        "kills": kills.total(),
        "by_process": dict(sorted(kills.items())),
        "others": dict(sorted(others.items())),
        "seconds_until_ready": round(statistics.median(back), 1) if back else None,
    }


def left(course: Course) -> dict[str, Any]:
    """Return what is left after the last answer, and how the servers have ended."""
    engines = [course.lines[-1]["processes"][name] for name in ENGINES]
    idle = {
        name: sum(engine.get(name, 0.0) for engine in engines) for name in ("running", "waiting", "pages")
    }
    ends = {name: code for name, code in course.codes.items() if code}
    return idle | {"orphans": course.orphans, "exit_codes": ends, "tracebacks": course.traces}


# ---------------------------------------------------------------- growth


def growth(lines: Sequence[Line]) -> dict[str, Any]:
    """Return the growth of each process in percent: of one that is never killed from the settled state to the
    end, of one that is killed between its earlier and its later lives at an equal age."""
    found: dict[str, Any] = {}
    for name in NEVER_KILLED:
        found[name] = {value: growth_of_life(lines, name, value) for value in GROWING}
    for name in KILLED:
        found[name] = {value: growth_at_age(lines, name, value) for value in GROWING}
    return found


def growth_of_life(lines: Sequence[Line], name: str, value: str) -> dict[str, float] | None:
    """Compare the medians of the first and the last SPAN seconds of the settled run."""
    end = lines[-1]["at"]
    begin = min(SETTLED, end / 2)
    span = min(SPAN, (end - begin) / 2)
    series = [(line["at"], line["processes"][name].get(value)) for line in lines]
    first = [x for at, x in series if begin <= at <= begin + span and x is not None]
    last = [x for at, x in series if at > end - span and x is not None]
    return compared(first, last)


def growth_at_age(lines: Sequence[Line], name: str, value: str) -> dict[str, float] | None:
    """Compare the medians of the earlier and the later half of a process's lives, each at the age AGE."""
    aged: dict[int, float] = {}
    for line in lines:
        sample = line["processes"][name]
        if AGE[0] <= sample["age"] < AGE[1] and value in sample:
            aged.setdefault(sample["life"], sample[value])
    lives = [aged[life] for life in sorted(aged)]
    half = len(lives) // 2
    return compared(lives[:half], lives[len(lives) - half :])


def compared(first: Sequence[float], last: Sequence[float]) -> dict[str, float] | None:
    if not first or not last:
        return None
    before, after = statistics.median(first), statistics.median(last)
    return {"before": before, "after": after, "percent": round(100 * (after / before - 1), 2)}


# ---------------------------------------------------------------- latencies and totals


def halves(course: Course) -> dict[str, Any]:
    """Return the times to the first token in the first and the second half of the settled run."""
    end = course.lines[-1]["at"]
    begin = min(SETTLED, end / 2)
    middle = (begin + end) / 2
    halves = {"first_half": (begin, middle), "second_half": (middle, end)}
    return {name: ttft(within(course.firsts, *times)) for name, times in halves.items()}


def within(firsts: Sequence[FirstToken], begin: float, end: float) -> list[FirstToken]:
    return [first for first in firsts if begin <= first.at < end]


def totals(lines: Sequence[Line]) -> dict[str, float]:
    """Return the sums of counters over all lives of all processes, as far as samples have seen them."""
    last: dict[tuple[str, int, str], float] = {}
    for line in lines:
        for process, sample in line["processes"].items():
            last |= {(process, sample["life"], name): sample[name] for name in TOTALS if name in sample}
    return {name: sum(value for key, value in last.items() if key[2] == name) for name in TOTALS}


def minutes(course: Course) -> list[dict[str, Any]]:
    """Return a row for each minute: answers, latencies, and the last sample of each process."""
    rows, before = [], Counter[str]()
    by_minute: dict[int, Line] = {int(line["at"] // 60): line for line in course.lines}
    for minute, line in sorted(by_minute.items()):
        done = Counter(line["clients"]["done"])
        rows.append(
            {
                "minute": minute,
                "answers": done["answers"] - before["answers"],
                "ttft": ttft(within(course.firsts, 60 * minute, 60 * minute + 60)),
                "processes": {
                    name: {value: sample.get(value) for value in SHOWN}
                    for name, sample in line["processes"].items()
                },
            }
        )
        before = done
    return rows


def busy(lines: Sequence[Line]) -> float:
    """Return the mean number of cores that the processes have kept busy."""
    seconds = 0.0
    for before, now in pairwise(lines):
        for name, sample in now["processes"].items():
            earlier = before["processes"][name]
            same = earlier["life"] == sample["life"]
            seconds += sample.get("cpu_seconds", 0.0) - (earlier.get("cpu_seconds", 0.0) if same else 0.0)
    return seconds / max(lines[-1]["at"] - lines[0]["at"], 1.0)


# ---------------------------------------------------------------- criteria


def violations(found: Mapping[str, Any], setting: Setting, proofs: Mapping[str, Proof]) -> list[str]:
    """Return the criteria that a run has not met."""
    counts, rest = found["answers"], found["left"]
    wrong = [f"{counts[name]} answers are {name}" for name in ("wrong", "lost", "in_no_log") if counts[name]]
    wrong += [f"{name} after the end: {value}" for name, value in rest.items() if value]
    wrong += [f"the log of {name}: {proof.failure}" for name, proof in proofs.items() if proof.failure]
    wrong += [] if counts["answers"] else ["there is no answer"]
    if setting.minutes >= LONG:
        wrong += [
            f"the resident set of {name} has grown by {most} %" for name, most in grown(found["growth"])
        ]
    return wrong


def grown(growth: Mapping[str, Any]) -> list[tuple[str, float]]:
    sizes = ((name, values["rss_mib"]) for name, values in growth.items())
    return [(name, size["percent"]) for name, size in sizes if size and size["percent"] > MOST_GROWTH]

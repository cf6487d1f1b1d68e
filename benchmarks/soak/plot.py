"""A picture of a run: resources and latencies over time, with the kills."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.soak.course import Course
from benchmarks.soak.fleet import SERVICES
from benchmarks.soak.probe import ttft
from benchmarks.soak.report import within

PANELS = {  # a value of the samples -> title
    "rss_mib": "resident set, MiB",
    "descriptors": "open descriptors",
    "threads": "threads",
    "pages": "pages in use, share of the cache",
}
POINTS = 180  # of a line at most


def plot(course: Course, title: str, file: Path) -> None:
    """Write an SVG. Raises ImportError without matplotlib."""
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "duetto", "font.size": 8})
    figure, axes = import_module("matplotlib.pyplot").subplots(3, 2, figsize=(12, 9), layout="constrained")
    names = list(course.lines[0]["processes"])
    for axis, (value, text) in zip(axes.flat, PANELS.items(), strict=False):
        for place, name in enumerate(names):
            axis.plot(*series(course, name, value), color=f"C{place}", linewidth=0.9)
        axis.set_title(text, loc="left")
    latencies(axes[2, 0], course)
    axes[2, 0].set_title("time to the first token by minute, s (p50, p99)", loc="left")
    rate(axes[2, 1], course)
    axes[2, 1].set_title("answers per second", loc="left")
    for axis in axes.flat:
        axis.set_xlabel("minutes")
        axis.spines[["top", "right"]].set_visible(False)
    kills = [fault.at / 60 for fault in course.faults if fault.kind == "kill"]
    axes[0, 0].plot(kills, [0] * len(kills), "|", color="0.4", markersize=6)
    handles = [axes[0, 0].plot([], [], color=f"C{i}", label=name)[0] for i, name in enumerate(names)]
    handles += axes[0, 0].plot([], [], "|", color="0.4", label="a process is killed")
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    figure.suptitle(title)
    figure.savefig(file, metadata={"Date": None})


def series(course: Course, name: str, value: str) -> tuple[list[float], list[float]]:
    """Return minutes and values of a process, with a gap between two lives."""
    step = max(1, len(course.lines) // POINTS)
    times, values, life = list[float](), list[float](), 0
    for line in course.lines[::step]:
        sample = line["processes"][name]
        gap = sample["life"] != life
        times += [line["at"] / 60] * (1 + gap)
        values += [float("nan")] * gap + [sample.get(value, float("nan"))]
        life = sample["life"]
    return times, values


def latencies(axis: Any, course: Course) -> None:
    for place, service in enumerate(SERVICES):
        for q, style in (("p50", ":"), ("p99", "-")):
            found = [(minute + 0.5, own[service][q]) for minute, own in by_minute(course) if service in own]
            if found:
                axis.plot(*zip(*found, strict=True), style, color=f"C{place}", label=f"{service}, {q}")
    axis.set_yscale("log")
    axis.legend(frameon=False, fontsize=7)


def by_minute(course: Course) -> Iterator[tuple[int, dict[str, dict[str, float]]]]:
    for minute in range(int(course.lines[-1]["at"] // 60) + 1):
        yield minute, ttft(within(course.firsts, 60 * minute, 60 * minute + 60))


def rate(axis: Any, course: Course) -> None:
    at = [line["at"] for line in course.lines]
    done = [line["clients"]["done"].get("answers", 0) for line in course.lines]
    step = max(1, len(at) // POINTS)
    at, done = at[::step], done[::step]
    rates = [(b - a) / (t - s) for a, b, s, t in zip(done, done[1:], at, at[1:], strict=False)]
    axis.plot([x / 60 for x in at[1:]], rates, color="0.3", linewidth=0.9)
    axis.set_ylim(bottom=0)

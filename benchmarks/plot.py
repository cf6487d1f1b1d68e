"""One picture of a run: decode steps, prefill, throughput, and latency against load, of every engine that was
measured."""

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.engines import OURS
from benchmarks.harness import Row

# part -> title, and what is on the vertical axis
PANELS = {
    "decode": "a decode step, ms",
    "prefill": "prefill, tokens/s",
    "throughput": "all requests at once, tokens/s",
    "serving": "TTFT p99 while requests arrive, ms",
}


def plot(rows: Sequence[Row], title: str, file: Path) -> None:
    """Writes an SVG. Raises ImportError without matplotlib."""
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "duetto", "font.size": 8})
    figure, axes = import_module("matplotlib.pyplot").subplots(2, 2, figsize=(11, 7), layout="constrained")
    engines = list(dict.fromkeys(row.engine for part in PANELS for row in rows if row.part == part))
    for axis, (part, name) in zip(axes.flat, PANELS.items(), strict=True):
        bars(axis, [row for row in rows if row.part == part and shown(row)], engines)
        axis.set_title(name, loc="left")
    handles = [axes[0, 0].bar([0], [0], color=colour(name, engines), label=name) for name in engines]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title)
    figure.savefig(file, metadata={"Date": None})


def colour(engine: str, engines: Sequence[str]) -> str:
    """Ours in colours, the others in greys, so that ours are found at once."""
    own = engine.startswith(OURS)
    alike = [name for name in engines if name.startswith(OURS) == own]
    place = alike.index(engine)
    return f"C{place}" if own else str(0.35 + 0.5 * place / max(len(alike) - 1, 1))


def shown(row: Row) -> bool:
    return row.unit != "%" and (row.part != "serving" or "TTFT p99" in row.what and row.unit == "ms")


def bars(axis: Any, rows: Sequence[Row], engines: Sequence[str]) -> None:
    """A group of bars for each figure, a bar for each engine."""
    groups = list(dict.fromkeys(row.what for row in rows))
    width = 0.8 / max(len(engines), 1)
    for row in rows:
        at = groups.index(row.what) + (engines.index(row.engine) + 0.5) * width - 0.4
        axis.bar(at, row.median, width, color=colour(row.engine, engines))
    axis.set_xticks(
        range(len(groups)), [what.removesuffix(", TTFT p99").replace(", ", "\n") for what in groups]
    )
    axis.spines[["top", "right"]].set_visible(False)

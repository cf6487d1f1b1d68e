"""How far a simulation is off, as a picture: what `benchmarks/studies/simulation.py --json FILE` has written.

    python benchmarks/studies/simulation_errors.py FILE.json docs/images/simulation.svg

A panel for each figure: a point for each round of each load, and the band that was aimed at.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

NAMES = {
    "ttft_p50": "TTFT p50",
    "ttft_p99": "TTFT p99",
    "tpot_p50": "TPOT p50",
    "tpot_p99": "TPOT p99",
    "tokens_per_second": "tokens/s",
}
KINDS = {"lines": "a line for each shape", "moments": "each call as its neighbours"}


def plot(found: dict[str, Any], file: Path) -> None:
    """Writes an SVG. Raises ImportError without matplotlib."""
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "duetto", "font.size": 8})
    pyplot = import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(1, len(NAMES), figsize=(11, 3), layout="constrained", sharey=True)
    for axis, (name, title) in zip(axes, NAMES.items(), strict=True):
        panel(axis, found["rows"], name, found["about"]["bounds"][name])
        axis.set_title(title, loc="left")
    axes[0].set_ylabel("simulated against real, % off")
    figure.supxlabel("load, % of what the engine gives where all requests are there at once")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2, frameon=False)
    figure.savefig(file, metadata={"Date": None})


def panel(axis: Any, rows: list[dict[str, Any]], name: str, bound: float) -> None:
    axis.axhspan(-100 * bound, 100 * bound, color="0.92")
    axis.axhline(0, color="0.6", linewidth=0.5)
    for place, (kind, label) in enumerate(KINDS.items()):
        loads = [100 * row["load"] + 2 * place - 1 for row in rows]
        axis.plot(loads, [100 * row["off"][kind][name] for row in rows], "o", markersize=3, label=label)
    axis.set_xticks(sorted({round(100 * row["load"]) for row in rows}))
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    plot(json.loads(source.read_text()), target)

"""The answer as a picture."""

import math
import os
from importlib import import_module
from pathlib import Path
from typing import Any

from ...planner.simulation.search import CandidateResult, SearchGoal
from ...planner.workloads.workload import Workload


def check_picture(file: Path) -> None:
    """Raises ValueError where no picture can be written."""
    try:
        kinds = import_module("matplotlib.backend_bases").FigureCanvasBase.get_supported_filetypes()
    except ImportError as error:
        raise ValueError(f"--plot is not allowed: there is no {error.name}; pip install matplotlib") from None
    if file.suffix[1:] not in kinds:
        raise ValueError(f"--plot {file} is not allowed: its ending is one of {', '.join(sorted(kinds))}")
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise ValueError(f"--plot {file} is not allowed: no file can be written there")


def plot(found: list[CandidateResult], load: Workload, aim: SearchGoal, title: str, file: Path) -> None:
    """Every load that was simulated, throughput against the time between tokens."""
    matplotlib: Any = import_module("matplotlib")
    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "duetto", "font.size": 8})
    figure, axis = import_module("matplotlib.pyplot").subplots(figsize=(7, 4.5), layout="constrained")
    for answer in found:
        points = sorted((p for p in answer.points if p.outcome["tpot"]), key=lambda p: p.rate)
        x = [p.outcome["tpot"]["p99"] * 1e3 for p in points]
        y = [p.rate * load.output / answer.candidate.devices for p in points]
        axis.plot(x, y, marker="o", markersize=3, label=answer.candidate.name)
    if aim.within.tpot < math.inf:
        axis.axvline(aim.within.tpot * 1e3, color="0.6", linestyle=":")
    axis.set(xlabel="p99 of the time between tokens, ms", ylabel="tokens/s a device", title=title)
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)

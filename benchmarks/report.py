"""What a run leaves: lines on the terminal as figures come, a JSON file that says where they were taken, and
its reading."""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.harness import Bench, Row

PACKAGES = (
    "duetto", "jax", "jaxlib", "numpy", "torch", "transformers", "accelerate", "llama-cpp-python", "gguf",
)  # fmt: skip
ROOT = Path(__file__).resolve().parents[1]
HEAD = f"{'part':<11}{'what':<62}{'engine':<36}{'median':>10}"


@dataclass(frozen=True)
class Result:
    """A run as its JSON file holds it."""

    about: dict[str, Any]
    notes: list[str]
    rows: list[Row]


def line(row: Row) -> str:
    """A figure for the terminal: the median, and how many times as fast ours were."""
    ratios = "".join(f"  {name} is {ratio:.2f} x as fast" for name, ratio in row.faster.items())
    return f"{row.part:<11}{row.what:<62}{row.engine:<36}{row.median:>10.4g} {row.unit}{ratios}"


def about(bench: Bench, name: str, today: str) -> dict[str, Any]:
    """Where and with what figures are taken."""
    found = {package: version_of(package) for package in PACKAGES}
    shape = {key: bench.config[key] for key in sorted(bench.config) if isinstance(bench.config[key], int)}
    return {
        "date": today,
        "model": name,
        "shape": shape,
        "device": device(),
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {package: text for package, text in found.items() if text},
        "commit": commit(),
        "seats": bench.seats,
        "scale": str(bench.scale),
        "amount": asdict(bench.amount),
    }


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device() -> str:
    """The device that jax runs on; asked in another process, which gives its memory back."""
    ask = "import jax; d = jax.devices()[0]; print(d.platform, d.device_kind)"
    return printed([sys.executable, "-c", ask]) or "unknown"


def cpu() -> str:
    """The processor's name, from Linux's description of it where there is one."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    return next(
        (text.partition(": ")[2] for text in lines if text.startswith("model name")), platform.processor()
    )


def commit() -> str | None:
    return printed(["git", "-C", str(ROOT), "describe", "--always", "--dirty"])


def printed(command: list[str]) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def save(file: Path, about: dict[str, Any], notes: Iterable[str], rows: Iterable[Row]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = {"about": about, "notes": list(notes), "rows": [rounded(asdict(row)) for row in rows]}
    file.write_text(json.dumps(whole, indent=1) + "\n")


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    faster = {name: round(ratio, 3) for name, ratio in row["faster"].items()}
    return row | {"values": [float(f"{value:.5g}") for value in row["values"]], "faster": faster}


def load(file: Path) -> Result:
    """Raises OSError, ValueError for a file that `save` has not written."""
    found = json.loads(file.read_text())
    if not isinstance(found, dict) or not {"about", "notes", "rows"} <= set(found):
        raise ValueError(
            f"{file}: has no about, notes and rows, expected a file that `python -m benchmarks` has written"
        )
    names = {f.name for f in fields(Row)}
    return Result(
        found["about"], found["notes"], [Row(**{k: row[k] for k in names}) for row in found["rows"]]
    )

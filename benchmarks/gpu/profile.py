"""Times of a device's kernels, as jax's profiler records them."""

import gzip
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

THREADS = ("Stream", "tf_XLAEigen", "tf_XLAPjRt")  # of a GPU, and of a CPU


class Kernel(NamedTuple):
    """A kernel's calls and seconds in one step."""

    name: str
    calls: int
    seconds: float


def kernel_times(step: Callable[[], Any], repeats: int) -> list[Kernel]:
    """Profile `repeats` steps; return the kernels of a step, the longest first."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(repeats):
                jax.block_until_ready(step())
        (file,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    found: dict[str, list[float]] = defaultdict(list)
    for e in events:
        if e.get("ph") == "X" and names.get((e["pid"], e["tid"]), "").startswith(THREADS):
            found[e["name"]].append(e["dur"] * 1e-6)
    kernels = [Kernel(k, -(-len(v) // repeats), sum(v) / repeats) for k, v in found.items()]
    return sorted(kernels, key=lambda k: -k.seconds)

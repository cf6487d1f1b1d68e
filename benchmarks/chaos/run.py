"""A seed: its simulation, what it finds, and the fewest faults that still find it."""

import gc
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any

from benchmarks.chaos.alone import Alone
from benchmarks.chaos.faults import Fault
from benchmarks.chaos.fleet import Fleet

SIMULATIONS: dict[str, Callable[[int], Any]] = {
    "engine": Alone,
    "fleet": Fleet,
    "prefill": partial(Alone, is_helped=True),
}


def kind_of(seed: int) -> str:
    """Return the kind of a seed's simulation."""
    return list(SIMULATIONS)[seed % len(SIMULATIONS)]


@dataclass
class Outcome:
    """What a seed has found; `error` is empty if nothing."""

    seed: int
    kind: str
    faults: Sequence[Fault]
    error: str = ""
    events: int = 0
    seconds: float = 0.0
    asks: int = 0
    trace: str = ""  # hash of what has happened, and when
    log: str = ""  # standard error, and the traceback


def run(seed: int, only: Sequence[int] | None = None) -> Outcome:
    """Run a seed, or only some of its faults, by their numbers."""
    begun, said = time.perf_counter(), StringIO()
    before, sys.unraisablehook = sys.unraisablehook, lambda _: None  # of coroutines of killed processes
    gc.freeze()
    try:
        with redirect_stderr(said):
            outcome = played(seed, only)
            gc.collect()
    finally:
        sys.unraisablehook = before
    outcome.seconds, outcome.log = time.perf_counter() - begun, said.getvalue()
    return outcome


def played(seed: int, only: Sequence[int] | None) -> Outcome:
    kind = kind_of(seed)
    simulation = SIMULATIONS[kind](seed)
    faults = [f for i, f in enumerate(simulation.faults) if only is None or i in only]
    outcome, loop = Outcome(seed, kind, faults), simulation.loop
    try:
        loop.run_until_complete(simulation.play(faults))
        if loop.errors:
            raise loop.errors[0]
    except Exception as error:  # noqa: BLE001 - whatever it is, the seed has found it
        outcome.error = f"{type(error).__name__}: {error}"
        print("".join(traceback.format_exception(error)), file=sys.stderr)
    finally:
        loop.close()
    outcome.events, outcome.asks, outcome.trace = loop.events, len(simulation.asks), simulation.trace()
    return outcome


def shrunk(seed: int) -> Outcome:
    """Return the outcome of a failing seed with the fewest of its faults: halves, then single ones are left
    out while it still fails (delta debugging: Zeller and Hildebrandt, TSE 2002)."""
    found = run(seed)
    kept, size = list(range(len(found.faults))), max(1, len(found.faults) // 2)
    if (none := run(seed, ())).error:
        return none
    while size:
        for begin in range(0, len(kept), size):
            fewer = kept[:begin] + kept[begin + size :]
            if (smaller := run(seed, fewer)).error:
                found, kept = smaller, fewer
                break
        else:
            size //= 2
    return found

"""Seconds in which the stages of a pipeline computed, and in which they had no work."""

import queue
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

import jax

END = 10.0  # seconds that the end waits for a stage


class StageRun(NamedTuple):
    """A call of a stage's program, in a step that entered the first stage at `entered`. On a CPU the results
    may be there when the call returns."""

    entered: float
    called: float
    returned: float
    given: Any
    made: Any


RESET = StageRun(0.0, 0.0, 0.0, None, None)  # what was called before it does not count


class StageClock:
    """Seconds in which each stage computed, from the arrival of its inputs to that of its results; and
    seconds in which a step was in one of the stages, which it leaves at the stage `exit`.

    A thread for each stage waits for arrays, so that nothing else has to; `stop` ends these threads.
    """

    def __init__(self, stages: int, exit: int = -1):
        self._exit = exit
        self._stages = [StageRuns() for _ in range(stages)]
        self._threads = [threading.Thread(target=stage.watch, daemon=True) for stage in self._stages]
        for thread in self._threads:
            thread.start()

    def ran(self, stage: int, entered: float, called: float, given: Any, made: Any) -> None:
        self._stages[stage].runs.put(StageRun(entered, called, time.perf_counter(), given, made))

    def reset(self) -> None:
        """Count what is called from here on."""
        for stage in self._stages:
            stage.runs.put(RESET)

    def stop(self) -> None:
        """Count the calls so far, then end the threads; waits for END seconds each at most."""
        for stage in self._stages:
            stage.runs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # where it collects what held the clock
                thread.join(END)

    def report(self) -> dict[str, Any]:
        """Seconds with a step under way, in how many of them each stage computed, and the share of all
        stages' seconds in which they did not: the bubbles."""
        busy, seconds = [stage.busy for stage in self._stages], self._stages[self._exit].under_way
        bubbles = max(0.0, 1 - sum(busy) / (len(busy) * seconds)) if seconds else 0.0
        return {"seconds": seconds, "busy_seconds": busy, "bubbles": bubbles}


class StageRuns:
    """The runs of a stage, one after the other."""

    def __init__(self):
        self.runs: queue.SimpleQueue[StageRun | None] = queue.SimpleQueue()
        self.busy = self.under_way = 0.0
        self._ended = 0.0

    def watch(self) -> None:
        while (run := self.runs.get()) is not None:
            if run is RESET:
                self.busy = self.under_way = 0.0
                continue
            with suppress(Exception):  # of a step that fails, which the engine hears of
                self._count(run)
            del run

    def _count(self, run: StageRun) -> None:
        begun = max(self._ended, arrival(run.given, run.called))
        ended = max(begun, arrival(run.made, run.returned))
        self.under_way += ended - max(self._ended, run.entered)
        self.busy += ended - begun
        self._ended = ended


def arrival(made: Any, earliest: float) -> float:
    """The time when arrays were there; the earliest that it may be, if they are already."""
    if all(leaf.is_ready() for leaf in jax.tree.leaves(made)):
        return earliest
    jax.block_until_ready(made)
    return time.perf_counter()

"""Measurement of the seconds in which the stages of a pipeline computed, and in which they had no work."""

import queue
import threading
import time
from contextlib import suppress
from typing import Any, NamedTuple

import jax

STOP_TIMEOUT_SECONDS = 10.0  # seconds that `stop` waits for a stage's thread, at most


class StageRun(NamedTuple):
    """Call of a stage's program. On a CPU the results may be ready when the call returns.

    entered: time when the step entered the first stage, seconds.
    called, returned: times before and after the call, seconds.
    inputs, outputs: arrays of its inputs and its results.
    """

    entered: float
    called: float
    returned: float
    inputs: Any
    outputs: Any


RESET = StageRun(0.0, 0.0, 0.0, None, None)  # sets the counters to zero


class StageClock:
    """Clock of the stages of a pipeline.

    It counts the seconds in which each stage computed, from the arrival of its inputs to the arrival of its
    results. It also counts the seconds in which a step was in any stage; a step ends in the stage
    `last_stage`. One thread for each stage waits for arrays, so that no other thread does; `close` ends these
    threads.
    """

    def __init__(self, stages: int, last_stage: int = -1):
        self._last_stage = last_stage
        self._stages = [StageRuns() for _ in range(stages)]
        self._threads = [
            threading.Thread(target=stage.count_runs, name=f"duetto-stage-clock-{i}", daemon=True)
            for i, stage in enumerate(self._stages)
        ]
        for thread in self._threads:
            thread.start()

    def record_run(self, stage: int, entered: float, called: float, inputs: Any, outputs: Any) -> None:
        """Record a call that has returned now; the arguments are as in `StageRun`."""
        self._stages[stage].runs.put(StageRun(entered, called, time.perf_counter(), inputs, outputs))

    def reset(self) -> None:
        """Set all counters to zero: only later calls count."""
        for stage in self._stages:
            stage.runs.put(RESET)

    def close(self) -> None:
        """End the threads after they have counted all calls so far. Waits at most
        `STOP_TIMEOUT_SECONDS` for each thread."""
        for stage in self._stages:
            stage.runs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():  # garbage collection in one of them may call this
                thread.join(STOP_TIMEOUT_SECONDS)

    def report(self) -> dict[str, Any]:
        """Return the seconds with a step under way, the seconds in which each stage computed, and the
        bubbles: the fraction of all stages' seconds in which they did not compute."""
        busy_seconds = [stage.busy_seconds for stage in self._stages]
        seconds = self._stages[self._last_stage].active_seconds
        bubbles = max(0.0, 1 - sum(busy_seconds) / (len(busy_seconds) * seconds)) if seconds else 0.0
        return {"seconds": seconds, "busy_seconds": busy_seconds, "bubbles": bubbles}


class StageRuns:
    """Runs of a stage, counted one after the other in a thread.

    runs: queue of runs; None ends the thread.
    busy_seconds: seconds in which the stage computed.
    active_seconds: seconds in which a step was between its entry into the first stage and its end in this
        one.
    """

    def __init__(self):
        self.runs: queue.SimpleQueue[StageRun | None] = queue.SimpleQueue()
        self.busy_seconds = self.active_seconds = 0.0
        self._last_end = 0.0

    def count_runs(self) -> None:
        """Count runs until None is queued."""
        while (run := self.runs.get()) is not None:
            if run is RESET:
                self.busy_seconds = self.active_seconds = 0.0
                continue
            with suppress(Exception):  # errors of a failed step, which the engine receives too
                self._count_run(run)
            del run

    def _count_run(self, run: StageRun) -> None:
        """Wait for the arrays of a run, and add its seconds."""
        start = max(self._last_end, arrival_time(run.inputs, run.called))
        end = max(start, arrival_time(run.outputs, run.returned))
        self.active_seconds += end - max(self._last_end, run.entered)
        self.busy_seconds += end - start
        self._last_end = end


def arrival_time(arrays: Any, earliest: float) -> float:
    """Wait for arrays; returns the time when they were ready. Returns `earliest` if they are ready
    already."""
    if all(leaf.is_ready() for leaf in jax.tree.leaves(arrays)):
        return earliest
    jax.block_until_ready(arrays)
    return time.perf_counter()

"""Execution of a step on a route. Each group of devices has a thread, which dispatches its programs and
passes hidden states to the next stage. No step waits for the host: the last stage sends its sampled tokens to
the first, from device to device.

Each stage has its own program (as in PipeDream, Harlap et al., arXiv 1806.03377). So stages may differ in
size, and compute different phases at the same time.
"""

import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Sharding

from ....kvcache.pages import ON_DEVICE, Batch, KVCache
from ....kvcache.stages import join_caches
from ....model.transformer import Decoder
from ..compiled.futures import StepFuture, wait_result
from .clock import StageClock
from .route import FFN_HALF, Stage

MAX_PENDING_UPDATES = 32  # steps whose tokens the first stage has not received, at most


class StageThreads:
    """Threads of a pipeline, one for each group of devices. A thread dispatches its programs one after the
    other, each as soon as its inputs have arrived.

    names: of the groups.
    last_group: index of the group in which steps end.
    clock: counts the stages' seconds.
    """

    def __init__(self, names: Sequence[Any], last_group: int = -1):
        self.names, self.last_group, self.clock = names, last_group, StageClock(len(names), last_group)
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"duetto-stage-{name}") for name in names]
        self._pending: set[Future[Any]] = set()
        weakref.finalize(self, self.clock.close)

    def __len__(self) -> int:
        return len(self.names)

    def drain(self) -> None:
        """Wait until all jobs so far are done or have failed: then no job holds arrays."""
        wait(list(self._pending))
        for thread in self._threads:
            thread.submit(lambda: None).result()

    def submit(self, stage: int, work: Callable[..., Any], *inputs: Any) -> StepFuture:
        """Call `work` in a group's thread once all inputs have arrived; returns the future of its result. No
        thread waits for inputs, so an input may come from later work of the same group."""
        return self.submit_parts(1, stage, lambda *arrived: (work(*arrived),), *inputs)[0]

    def submit_parts(
        self, count: int, stage: int, work: Callable[..., Any], *inputs: Any
    ) -> list[StepFuture]:
        """Call `work` like `submit`, and return one future for each of its `count` results. A result can be
        freed while others are held."""
        futures = [Future[Any]() for _ in range(count)]
        for future in futures:
            self._pending.add(future)
            future.add_done_callback(self._pending.discard)
        jobs = [promise.job for promise in inputs if isinstance(promise, StepFuture)]
        work_and_inputs = [(work, inputs, futures)]  # emptied at the start: a future keeps its callbacks

        def start_work() -> None:
            work, inputs, futures = work_and_inputs.pop()
            # no closure: a closure would keep the arrays as long as the traceback of an error
            job = self._threads[stage].submit(call_with_results, work, inputs)
            job.add_done_callback(partial(resolve_futures, futures))

        run_when_done(jobs, start_work)
        return list(map(StepFuture, futures))


def run_when_done(jobs: Iterable[Future[Any]], action: Callable[[], Any]) -> None:
    """Call `action` once all jobs are done: in this thread, or in the thread that ends the last job."""
    remaining = iter(jobs)

    def wait_for_next(_: Any = None) -> None:
        """Wait for the next job that is not done, or call `action`."""
        for job in remaining:
            if not job.done():
                job.add_done_callback(wait_for_next)
                return
        action()

    wait_for_next()


def call_with_results(work: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """Call `work` with the results of its inputs, which may be futures."""
    return work(*map(wait_result, inputs))


def resolve_futures(futures: "Sequence[Future[Any]]", job: "Future[Any]") -> None:
    """Set the results of a job that is done, or its exception, in its futures."""
    if (error := job.exception()) is not None:
        for future in futures:
            future.set_exception(error)
        return
    for future, result in zip(futures, job.result(), strict=True):
        future.set_result(result)


@dataclass(frozen=True)
class StagedCache:
    """Cache in parts.

    parts: for each stage with pools a KVCache, or its future.
    """

    parts: tuple[Any, ...]

    def wait_result(self) -> KVCache:
        """Wait for all parts, and join them."""
        return join_caches(map(wait_result, self.parts))


class SlotUpdate(NamedTuple):
    """Change of slots by a step.

    slots: numbers of the slots of the step's rows.
    slots_future: future of the last stage's `FirstStageSlots`, on the first stage's devices.
    """

    slots: frozenset[int]
    slots_future: StepFuture


@dataclass(frozen=True)
class StagedSlots:
    """Slots of a pipeline, in two parts that may be futures.

    last_stage_slots: Slots of the last stage.
    first_stage_slots: FirstStageSlots of the first stage.
    updates: updates that the first stage has not merged yet, the oldest first.
    """

    last_stage_slots: Any
    first_stage_slots: Any
    updates: tuple[SlotUpdate, ...] = ()

    def wait_result(self) -> Any:
        """Wait for the last stage's slots."""
        return wait_result(self.last_stage_slots)

    def updates_without_slot(self, slot: int) -> tuple[SlotUpdate, ...]:
        """Return the pending updates without one slot, which has been assigned to another request."""
        return tuple(update._replace(slots=update.slots - {slot}) for update in self.updates)


@dataclass(frozen=True)
class SlotUpdateReceiver:
    """Receiver of updates, which merges them into the first stage's slots.

    stages: threads of the pipeline.
    merge_program: program that merges one update.
    """

    stages: StageThreads
    merge_program: Any

    def merge_pending_updates(
        self, slots: StagedSlots, rows: frozenset[int]
    ) -> tuple[Any, tuple[SlotUpdate, ...]]:
        """Merge pending updates up to the newest one that changes a slot in `rows`. Returns the first stage's
        slots, and the updates that are still pending."""
        needed = [i + 1 for i, update in enumerate(slots.updates) if update.slots & rows]
        count = max([*needed, len(slots.updates) - MAX_PENDING_UPDATES, 0])
        first_stage_slots = slots.first_stage_slots
        for update in slots.updates[:count]:
            first_stage_slots = self.stages.submit(
                0, self._merge_update, first_stage_slots, update.slots_future, update.slots
            )
        return first_stage_slots, slots.updates[count:]

    def _merge_update(self, first_stage_slots: Any, update: Any, slots: frozenset[int]) -> Any:
        """Merge the update of the slots in `slots`."""
        mask = np.zeros(first_stage_slots.live.shape, bool)
        mask[list(slots)] = True
        return self.merge_program(first_stage_slots, update, mask)


@dataclass(frozen=True)
class PipelinedStep:
    """Step of a shape on a route, called like the program of one device.

    stages: threads of the pipeline.
    route: stages of the step, in order.
    programs: compiled program of each stage.
    shardings: sharding of each stage's replicated arrays.
    receiver: receiver of slot updates.
    """

    stages: StageThreads
    route: tuple[Stage, ...]
    programs: tuple[Any, ...]
    shardings: tuple[Sharding, ...]
    receiver: SlotUpdateReceiver

    def __call__(
        self, params: Decoder, cache: StagedCache, slots: StagedSlots, batch: Batch
    ) -> tuple[StagedCache, StagedSlots, StepFuture]:
        activations, updates = self.receiver.merge_pending_updates(slots, slots_awaiting_token(batch))
        first_stage_slots, device_batch, pools, parts = activations, batch, iter(cache.parts), []
        if self.has_revisits:  # copied once: many programs take the batch
            device_batch = self.stages.submit(0, lambda: jax.device_put(batch, self.shardings[0]))
        kept_by_group: dict[int, Any] = {}  # by device group, what its next stage needs
        output = None
        for i, stage in enumerate(self.route):
            pool = next(pools) if stage.pool_layers else None
            stage_batch = None if stage.half == FFN_HALF else device_batch
            inputs = (
                pool,
                slots.last_stage_slots if stage.is_last else None,
                kept_by_group.get(stage.group),
                activations,
                stage_batch,
            )
            run = partial(self._run, i)
            part, kept_by_group[stage.group], output, activations = self.stages.submit_parts(
                4, stage.group, run, stage.select_params(params), *inputs
            )
            parts += [part] if stage.pool_layers else []
        assert output is not None, "a route has a stage at least"
        updates = (*updates, SlotUpdate(occupied_slots(batch), activations))
        return (
            StagedCache(tuple(parts)),
            StagedSlots(kept_by_group[self.route[-1].group], first_stage_slots, updates),
            output,
        )

    @property
    def has_revisits(self) -> bool:
        """True if a step visits a group of devices more than once."""
        return len(self.route) > len(self.stages)

    def as_text(self) -> str:
        """Return the text of the compiled programs."""
        return "\n".join(program.as_text() or "" for program in dict.fromkeys(self.programs))

    def _run(
        self, i: int, params: Any, pool: Any, slots: Any, kept: Any, inputs: Any, batch: Any
    ) -> tuple[Any, Any, Any, Any]:
        """Dispatch the program of stage i. Returns its pools, what its group keeps, the output, and the
        inputs of the next stage: arrays on that stage's devices, and the time when the step entered the first
        stage."""
        called = time.perf_counter()
        activations, entered = inputs if i else (inputs, called)
        pool, kept, output, out = self.programs[i](params, pool, slots, kept, activations, batch)
        if self.has_revisits:
            # A group takes the micro-batch next whose hidden states have arrived. If a whole step were
            # dispatched ahead, an accelerator would run it before the other micro-batches.
            jax.block_until_ready((pool, kept, output, out))
        self.stages.clock.record_run(self.route[i].group, entered, called, activations, out)
        out = jax.device_put(out, self.shardings[(i + 1) % len(self.route)])
        return pool, kept, output, out if self.route[i].is_last else (out, entered)


def occupied_slots(batch: Batch) -> frozenset[int]:
    """Return the slots of a batch's rows."""
    return frozenset(batch.slot[batch.count > 0].tolist())


def slots_awaiting_token(batch: Batch) -> frozenset[int]:
    """Return the slots of rows whose first token only the device knows."""
    return frozenset(batch.slot[(batch.count > 0) & (batch.tokens[:, 0] == ON_DEVICE)].tolist())

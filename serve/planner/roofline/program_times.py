"""Measurement of a plan's programs on this machine: how long they take, and the memory that they need."""

import statistics
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ....kvcache.pages import Batch
from ...host.devices import time_calls
from ...runtime.compiled.batch_arrays import empty_batch
from ...runtime.compiled.local_executor import LocalExecutor
from ...runtime.compiled.lowering import StepArguments
from ...runtime.compiled.shapes import Shape, Sizes
from ...runtime.steps.output import Output
from .floor import row_starts

TIMED_CALLS = 5
STATUS_FILE = Path("/proc/self/status")


class ProgramTimes(NamedTuple):
    """Measured programs.

    seconds: of each program, the median of TIMED_CALLS calls.
    peak: most bytes that parameters, state and programs took; None if unknown.
    """

    seconds: dict[Shape, float]
    peak: int | None


def measure_programs(executor: LocalExecutor, arguments: StepArguments, context: int) -> ProgramTimes:
    """Run compiled programs with every row in use. Rows have `context` tokens in the cache, but none in a
    prefill.

    `arguments` are shapes; all parameters are one small number. A host's memory is the growth of the resident
    set, so the process must hold no freed memory. It is None if the system does not report it.
    """
    bytes_before = measure_used_bytes(resets_peak=True)
    params = jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype, device=x.sharding), arguments.params)
    state = fill_slots(executor.fresh_arguments(params))
    seconds = {}
    for shape in executor.programs.steps:
        batch = full_batch(executor.programs.sizes, shape, 0 if shape.phase == "prefill" else context)
        seconds[shape], state = time_program(executor, shape, state, batch)
    bytes_after = measure_used_bytes()
    return ProgramTimes(
        seconds, None if bytes_before is None or bytes_after is None else bytes_after - bytes_before
    )


def fill_slots(arguments: StepArguments) -> StepArguments:
    """Fill every slot with a request that does not end."""
    slots = arguments.slots
    last_position = jnp.full_like(slots.end, np.iinfo(np.int32).max)
    return replace(arguments, slots=replace(slots, live=jnp.ones_like(slots.live), end=last_position))


def full_batch(sizes: Sizes, shape: Shape, context: int) -> Batch:
    """Return a batch whose rows have as many tokens as they hold, after `context` cached ones. Each row has
    pages of its own while there are enough. A prefill's rows are one prompt's."""
    batch = empty_batch(sizes, shape, 0)
    row_slots = np.tile(np.arange(shape.rows) * shape.num_sequences // shape.rows, sizes.shards)
    is_filled = row_slots < min(sizes.max_num_seqs, shape.max_rows(shape.tokens))
    batch.tokens[:], batch.count[:] = 1, np.where(is_filled, shape.tokens, 0)
    batch.start[:] = np.tile(row_starts(shape, context), sizes.shards)
    batch.slot[:] = np.where(is_filled, row_slots, sizes.max_num_seqs)
    pages = -(-(int(batch.start[-1]) + shape.tokens) // sizes.page_size)
    for table, count in zip(batch.page_tables, sizes.pages, strict=True):
        width = min(pages, table.shape[1])
        table[:, :width] = (row_slots[:, None] * width + np.arange(width)) % count
    return batch


def time_program(
    executor: LocalExecutor, shape: Shape, arguments: StepArguments, batch: Batch
) -> tuple[float, StepArguments]:
    """Return the median seconds of a call, without the first one, and the arguments after it."""

    def call() -> Output:
        nonlocal arguments
        cache, slots, output = executor.run(shape, arguments, batch)
        arguments = replace(arguments, cache=cache, slots=slots)
        return output

    return statistics.median(time_calls(call, TIMED_CALLS + 1)[1:]), arguments


def measure_used_bytes(resets_peak: bool = False) -> int | None:
    """Return the most bytes in use since the last reset, or with `resets_peak` the bytes in use now. The
    device counts them; on a host it is the resident set. Return None if the system does not report it."""
    stats = jax.devices()[0].memory_stats()
    if stats:
        return stats["bytes_in_use" if resets_peak else "peak_bytes_in_use"]
    try:
        if resets_peak:
            Path("/proc/self/clear_refs").write_text("5")
        return read_status_kilobytes("VmRSS" if resets_peak else "VmHWM") * 1024
    except (OSError, StopIteration):  # another system, or a container that hides it
        return None


def read_status_kilobytes(name: str) -> int:
    """Return the figure `name` of the process's status, in KiB."""
    lines: Iterable[Any] = (line.split() for line in STATUS_FILE.read_text().splitlines())
    return next(int(line[1]) for line in lines if line[0] == f"{name}:")

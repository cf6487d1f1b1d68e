"""A plan put to the test on this machine: how long its programs take, and the memory that they need."""

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
from ...runtime.compiled.batches import empty_batch
from ...runtime.compiled.compile import Programs, StepArguments
from ...runtime.compiled.shapes import Shape
from ...runtime.steps.step import Output
from .floor import starts

REPEATS = 5
STATUS = Path("/proc/self/status")


class MeasuredPrograms(NamedTuple):
    """Seconds of each program, the median of REPEATS calls; and bytes that parameters, state and programs
    took at most."""

    seconds: dict[Shape, float]
    peak: int | None


def measure(programs: Programs, arguments: StepArguments, context: int) -> MeasuredPrograms:
    """Run compiled programs with every row awake, and `context` tokens in the cache of all but those of
    prefill.

    `arguments` are shapes: parameters are all the same small number. A host's memory is the growth of the
    resident set, in a process that has kept no freed memory yet; None where the system does not tell.
    """
    before = memory(reset=True)
    params = jax.tree.map(lambda x: jnp.full(x.shape, 0.01, x.dtype, device=x.sharding), arguments.params)
    state = unending(programs.empty(params))
    seconds = {}
    for shape in programs.steps:
        batch = full_batch(programs, shape, 0 if shape.phase == "prefill" else context)
        seconds[shape], state = timed(programs, shape, state, batch)
    after = memory()
    return MeasuredPrograms(seconds, None if before is None or after is None else after - before)


def unending(state: StepArguments) -> StepArguments:
    """Every slot with a request that does not end."""
    slots = state.slots
    far = jnp.full_like(slots.end, np.iinfo(np.int32).max)
    return replace(state, slots=replace(slots, live=jnp.ones_like(slots.live), end=far))


def full_batch(programs: Programs, shape: Shape, context: int) -> Batch:
    """Rows with as many tokens as they hold after `context` others, in pages of their own as long as there
    are some; a prefill's rows are one prompt's."""
    sizes = programs.sizes
    batch = empty_batch(sizes, shape, 0)
    own = np.tile(np.arange(shape.rows) * shape.sequences // shape.rows, sizes.shards)  # whose each row is
    seated = own < min(sizes.max_num_seqs, shape.rows_of(shape.tokens))  # the rows beyond are empty
    batch.tokens[:], batch.count[:] = 1, np.where(seated, shape.tokens, 0)
    batch.start[:] = np.tile(starts(shape, context), sizes.shards)
    batch.slot[:] = np.where(seated, own, sizes.max_num_seqs)
    pages = -(-(int(batch.start[-1]) + shape.tokens) // sizes.page_size)
    for table, count in zip(batch.page_tables, sizes.pages, strict=True):
        width = min(pages, table.shape[1])
        table[:, :width] = (own[:, None] * width + np.arange(width)) % count
    return batch


def timed(
    programs: Programs, shape: Shape, state: StepArguments, batch: Batch
) -> tuple[float, StepArguments]:
    """Seconds of a call, the first one aside, and the state it leaves."""

    def call() -> Output:
        nonlocal state
        cache, slots, output = programs.run(shape, state, batch)
        state = replace(state, cache=cache, slots=slots)
        return output

    return statistics.median(time_calls(call, REPEATS + 1)[1:]), state


def memory(reset: bool = False) -> int | None:
    """Bytes that were in use at most since the last reset, or now if it is one: a device's own count, or the
    resident set."""
    stats = jax.devices()[0].memory_stats()
    if stats:
        return stats["bytes_in_use" if reset else "peak_bytes_in_use"]
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        return kilobytes("VmRSS" if reset else "VmHWM") * 1024
    except (OSError, StopIteration):  # another system, or a container that hides it
        return None


def kilobytes(name: str) -> int:
    lines: Iterable[Any] = (line.split() for line in STATUS.read_text().splitlines())
    return next(int(line[1]) for line in lines if line[0] == f"{name}:")

"""Facts of a compiled program: its memory plan, the bytes it touches, and what it moves between buffers and
devices."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

import jax

from .hlo import (
    ExecutedInstruction,
    Instruction,
    Module,
    ModuleExecution,
    PoolBuffer,
    buffer_types,
    is_in_main_memory,
    result_type,
    type_bytes,
    type_label,
)
from .products import Product, find_products
from .thunks import ThunkCounts

MIN_MOVED_BYTES = 1 << 20  # bytes; copies of smaller buffers are not listed
MOVING_NAMES = re.compile(r"copy|transpose|slice|gather")
MOVING_OPERATIONS = ("fusion", "copy", "transpose", "slice", "dynamic-slice", "gather")
# Bytes that a device sends in a ring of n for each byte of a collective's result (Thakur et al., IJHPCA 19/1,
# 2005).
SENT_SHARES = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}


class BufferMove(NamedTuple):
    """A buffer that an instruction writes which only moves numbers.

    instruction: its name, without a number.
    buffer: its type.
    bytes: of the buffer.
    times: number of such instructions in the text.
    """

    instruction: str
    buffer: str
    bytes: int
    times: int


class Collective(NamedTuple):
    """A kind of collective in a program.

    calls: number of its runs.
    bytes: of all results.
    sent: bytes that each device sends.
    """

    calls: int
    bytes: int
    sent: int


@dataclass(frozen=True)
class ProgramFacts:
    """Memory and traffic of a compiled program.

    arguments, aliased, temporaries: bytes of its arguments, of those updated in place, and of its scratch
    memory.
    aliased_leaves: number of arrays updated in place.
    bytes: main memory touched by the cheapest branches (greedy requests without log-probabilities).
    most_bytes: main memory touched by the dearest branches.
    moved: each moving instruction of the text, once.
    collectives: by kind, on the cheapest branches.
    products: as XLA configured them, on GPUs.
    thunks: launches, of programs that `compile_with_thunks` compiled for GPUs.

    Loops count as often as they run, in `bytes`, `most_bytes` and `collectives`.
    """

    arguments: int
    aliased: int
    aliased_leaves: int
    temporaries: int
    bytes: int
    most_bytes: int
    moved: tuple[BufferMove, ...]
    collectives: dict[str, Collective]
    products: tuple[Product, ...] = ()
    thunks: ThunkCounts | None = None


def join_facts(parts: Sequence[ProgramFacts]) -> ProgramFacts:
    """Return the facts of a step whose programs run one after the other. Arguments count in the program that
    has most."""
    collectives: dict[str, Collective] = {}
    for kind, more in (item for part in parts for item in part.collectives.items()):
        before = collectives.get(kind, Collective(0, 0, 0))
        collectives[kind] = Collective(*map(sum, zip(before, more, strict=True)))
    thunks = [part.thunks for part in parts if part.thunks is not None]
    return ProgramFacts(
        max(part.arguments for part in parts),
        sum(part.aliased for part in parts),
        sum(part.aliased_leaves for part in parts),
        max(part.temporaries for part in parts),
        sum(part.bytes for part in parts),
        sum(part.most_bytes for part in parts),
        tuple(move for part in parts for move in part.moved),
        collectives,
        tuple(product for part in parts for product in part.products),
        ThunkCounts(*map(sum, zip(*map(astuple, thunks), strict=True))) if thunks else None,
    )


def read_program_facts(
    compiled: jax.stages.Compiled, pool_buffers: Sequence[PoolBuffer] = (), default_trips: int = 1
) -> ProgramFacts:
    """Read the facts of a compiled program. Loops over keys read these pools. A loop whose number of trips is
    unknown takes `default_trips`."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None, "this backend does not describe its programs"
    module = Module.parse(text)
    execution = ModuleExecution(module, tuple(pool_buffers), default_trips)
    return ProgramFacts(
        memory.argument_size_in_bytes,
        memory.alias_size_in_bytes,
        len(re.findall(r"(?:may|must)-alias", text.partition("\n")[0])),
        memory.temp_size_in_bytes,
        execution.bytes_accessed,
        ModuleExecution(
            module, tuple(pool_buffers), default_trips, takes_costliest_branches=True
        ).bytes_accessed,
        find_moves(module.buffer_instructions()),
        count_collectives(execution.executed_instructions, module.devices),
        find_products(module),
    )


def find_moves(instructions: Iterable[Instruction]) -> tuple[BufferMove, ...]:
    """Return copies, transposes, slices and gathers that write at least MIN_MOVED_BYTES bytes of main
    memory, the largest first."""
    counts = Counter(
        (re.sub(r"[.\d]+$", "", x.name), type_label(x.type_text))
        for x in instructions
        if MOVING_NAMES.search(x.name)
        and "update" not in x.name
        and x.operation in MOVING_OPERATIONS
        and type_bytes(x.type_text) >= MIN_MOVED_BYTES
        and is_in_main_memory(x.type_text)
    )
    rows = [BufferMove(name, kind, type_bytes(kind), times) for (name, kind), times in counts.items()]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.instruction)))


def count_collectives(runs: Iterable[ExecutedInstruction], devices: int) -> dict[str, Collective]:
    """Return the collectives of a program by kind. The start and the end of an asynchronous one are one
    call."""
    totals: dict[str, Collective] = {}
    for run in runs:
        x, name = run.instruction, run.instruction.operation.removesuffix("-start")
        if name in SENT_SHARES:
            size = run.times * sum(map(type_bytes, buffer_types(result_type(x, x.operands))))
            calls, before, sent = totals.get(name, Collective(0, 0, 0))
            totals[name] = Collective(
                calls + run.times, before + size, sent + round(SENT_SHARES[name](devices) * size)
            )
    return totals

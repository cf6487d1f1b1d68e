"""Facts of a compiled program: its memory plan, the bytes it touches, and what it moves between buffers and
devices."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax

from .hlo import (
    ExecutedInstruction,
    Instruction,
    Module,
    PoolBuffer,
    Walk,
    buffers,
    here,
    label,
    nbytes,
    result,
)
from .products import Product, products
from .thunks import Thunks

BIG = 1 << 20  # bytes of a buffer whose copying is worth a line
MOVING = re.compile(r"copy|transpose|slice|gather")
MOVES = ("fusion", "copy", "transpose", "slice", "dynamic-slice", "gather")
# Bytes that a device sends in a ring of n for each byte of a collective's result (Thakur et al., IJHPCA 19/1,
# 2005).
RING = {
    "all-reduce": lambda n: 2 * (n - 1) / n,
    "all-gather": lambda n: (n - 1) / n,
    "reduce-scatter": lambda n: n - 1,
    "all-to-all": lambda n: (n - 1) / n,
    "collective-permute": lambda n: 1,
}


class Moved(NamedTuple):
    """A buffer that is written by an instruction which only moves numbers, and how often the text has it."""

    instruction: str
    buffer: str
    bytes: int
    times: int


class Collective(NamedTuple):
    """A kind of collective in a program.

    calls: how often it runs.
    bytes: of all results.
    sent: bytes that each device sends.
    """

    calls: int
    bytes: int
    sent: int


@dataclass(frozen=True)
class ProgramFacts:
    """Bytes of a compiled program's arguments, of those updated in place, of its scratch memory; and what it
    moves.

    `bytes` of main memory are touched by the branches that touch the fewest (greedy requests without
    log-probabilities), `most_bytes` by the dearest; loops count as often as they run, and so do
    `collectives`, of the former. `moved` has every instruction of the text once. `thunks` are known of
    programs that were compiled for GPUs by `compile_thunks`.
    """

    arguments: int
    aliased: int
    aliased_leaves: int
    temporaries: int
    bytes: int
    most_bytes: int
    moved: tuple[Moved, ...]
    collectives: dict[str, Collective]
    products: tuple[Product, ...] = ()  # as XLA configured them, on GPUs
    thunks: Thunks | None = None


def facts(compiled: jax.stages.Compiled, pools: Sequence[PoolBuffer] = (), steps: int = 1) -> ProgramFacts:
    """Read a compiled program, whose loops over keys read these pools; other loops without an end in sight
    take `steps`."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None, "this backend does not describe its programs"
    module = Module.read(text)
    walk = Walk(module, tuple(pools), steps)
    return ProgramFacts(
        memory.argument_size_in_bytes,
        memory.alias_size_in_bytes,
        len(re.findall(r"(?:may|must)-alias", text.partition("\n")[0])),
        memory.temp_size_in_bytes,
        walk.bytes,
        Walk(module, tuple(pools), steps, dearest=True).bytes,
        moved(module.written()),
        collectives(walk.runs, module.devices),
        products(module),
    )


def moved(instructions: Iterable[Instruction]) -> tuple[Moved, ...]:
    """Copies, transposes, slices and gathers that write BIG bytes of main memory and more, the largest
    first."""
    counts = Counter(
        (re.sub(r"[.\d]+$", "", x.name), label(x.kind))
        for x in instructions
        if MOVING.search(x.name)
        and "update" not in x.name
        and x.operation in MOVES
        and nbytes(x.kind) >= BIG
        and here(x.kind)
    )
    rows = [Moved(name, kind, nbytes(kind), times) for (name, kind), times in counts.items()]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.instruction)))


def collectives(runs: Iterable[ExecutedInstruction], devices: int) -> dict[str, Collective]:
    """Return the collectives of a program by kind; the two halves of an asynchronous one are one call."""
    found: dict[str, Collective] = {}
    for run in runs:
        x, name = run.instruction, run.instruction.operation.removesuffix("-start")
        if name in RING:
            size = run.times * sum(map(nbytes, buffers(result(x, x.operands))))
            calls, before, sent = found.get(name, Collective(0, 0, 0))
            found[name] = Collective(
                calls + run.times, before + size, sent + round(RING[name](devices) * size)
            )
    return found

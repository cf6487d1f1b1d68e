"""What XLA made of a program: its memory plan, and what the optimised module moves between buffers and devices."""

import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import jax

BIG = 1 << 20  # bytes of a buffer whose copying is worth a line
WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s64": 8, "u64": 8, "f64": 8}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
MOVING = re.compile(r"copy|transpose|slice|gather")
INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (\([^=]*?\)|\S+) ([a-z][a-z0-9-]*)\(")
BUFFER = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")


class Moved(NamedTuple):
    """A buffer that is written by an instruction which only moves numbers, and how often the text has it."""

    instruction: str
    buffer: str
    bytes: int
    times: int


@dataclass(frozen=True)
class Facts:
    """Bytes of a compiled program's arguments, of those updated in place, and of its scratch memory; and what it moves.

    Instructions in a loop's body are counted once. `collectives` has calls and bytes of each kind.
    """

    arguments: int
    aliased: int
    aliased_leaves: int
    temporaries: int
    moved: tuple[Moved, ...]
    collectives: dict[str, tuple[int, int]]


def facts(compiled: jax.stages.Compiled) -> Facts:
    """Read a compiled program."""
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and text is not None, "this backend does not describe its programs"
    instructions = written(text)
    return Facts(
        memory.argument_size_in_bytes,
        memory.alias_size_in_bytes,
        len(re.findall(r"(?:may|must)-alias", text.partition("\n")[0])),
        memory.temp_size_in_bytes,
        moved(instructions),
        collectives(instructions),
    )


def written(text: str) -> list[tuple[str, str, str]]:
    """Name, type and operation of each instruction that writes a buffer: all but those inside a fusion."""
    inside = set(re.findall(r" fusion\(.*?calls=%?([\w.-]+)", text))
    found, skipping = [], False
    for line in text.splitlines():
        head = re.match(r"^(?:ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if head:
            skipping = head[1] in inside
        elif not skipping and (instruction := INSTRUCTION.match(line)):
            found.append((instruction[1], instruction[2], instruction[3]))
    return found


def moved(instructions: list[tuple[str, str, str]]) -> tuple[Moved, ...]:
    """Copies, transposes, slices and gathers of BIG bytes and more, the largest first."""
    counts = Counter(
        (re.sub(r"[.\d]+$", "", name), label(kind))
        for name, kind, operation in instructions
        if MOVING.search(name) and "update" not in name and operation in MOVES and nbytes(kind) >= BIG
    )
    rows = [Moved(name, kind, nbytes(kind), times) for (name, kind), times in counts.items()]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.instruction)))


MOVES = ("fusion", "copy", "transpose", "slice", "dynamic-slice", "gather")


def collectives(instructions: list[tuple[str, str, str]]) -> dict[str, tuple[int, int]]:
    """Calls and bytes of results, by kind; the two halves of an asynchronous one are one call."""
    found: dict[str, tuple[int, int]] = {}
    for _, kind, operation in instructions:
        name = operation.removesuffix("-start")
        if name in COLLECTIVES:
            calls, size = found.get(name, (0, 0))
            found[name] = calls + 1, size + nbytes(kind) // (2 if operation.endswith("-start") else 1)
    return found


def nbytes(kind: str) -> int:
    """Bytes of a type such as bf16[64,8,128] or of a tuple of types, without padding."""
    return sum(
        width(name) * math.prod(int(n) for n in sizes.split(",") if n) for name, sizes in BUFFER.findall(kind)
    )


def label(kind: str) -> str:
    """A type without its layout."""
    return ", ".join(f"{name}[{sizes}]" for name, sizes in BUFFER.findall(kind))


def width(name: str) -> int:
    return WIDTHS.get(name, 1 if name.startswith("f8") else 4)

"""XLA's optimised module read from its text: which instructions run, how often, and the bytes of main memory
that each touches.

A fusion reads its operands and writes its results once, whatever happens inside it; of an operand that is
only sliced, gathered or updated in place, it touches those parts. The rules are those of XLA's own cost
analysis, which counts a loop's body once, charges a gather its whole table and does not exist for GPUs that
are not there. Buffers in a TPU's vector memory are free.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

WIDTHS = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s64": 8, "u64": 8, "f64": 8}
BUFFER = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")
ELSEWHERE = re.compile(r"S\([1-9]")  # a memory space that is not the main one
START = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = ")
HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
CALLED = re.compile(r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)")
FREE = (
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier",
    "add-dependency", "partition-id", "replica-id",
)  # fmt: skip
PARTS = ("slice", "dynamic-slice", "gather")
UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # and which operand is what they write


class Instruction(NamedTuple):
    """A line of a module: `inside` is the text between its parentheses, `rest` all that follows."""

    name: str
    kind: str
    operation: str
    inside: str
    rest: str
    root: bool

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.-]+)", self.inside)

    def calls(self, *roles: str) -> list[str]:
        """Computations that it applies in these roles, in the text's order."""
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.rest)
        if branches and "branch_computations" in roles:
            return re.findall(r"%?([\w.-]+)", branches[1])
        return [name for role, name in CALLED.findall(self.rest) if role in roles]


Computation = dict[str, Instruction]


class PoolBuffer(NamedTuple):
    """A layer's buffer of pages: its bytes, the live ones, and the blocks that a loop over its keys takes."""

    bytes: int
    live: int
    blocks: int
    arrays: int = 2  # that its layer has


class ExecutedInstruction(NamedTuple):
    """An instruction that is executed, how often, and the bytes that it touches each time."""

    instruction: Instruction
    times: int
    bytes: int


@dataclass(frozen=True)
class Module:
    """A program's computations by name, each its instructions by name."""

    computations: dict[str, Computation]
    entry: str
    devices: int  # that run it together

    @classmethod
    def read(cls, text: str) -> "Module":
        computations: dict[str, Computation] = {}
        entry, current = "", {}
        devices = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
        for line in text.splitlines():
            if head := HEAD.match(line):
                current = computations[head[2]] = {}
                entry = head[2] if head[1] else entry
            elif start := START.match(line):
                found = parsed(line, start)
                current[found.name] = found
        return cls(computations, entry, int(devices[1]) if devices else 1)

    @cached_property
    def fused(self) -> set[str]:
        """Computations inside a fusion: they write no buffer of their own."""
        every = (x for computation in self.computations.values() for x in computation.values())
        return {name for x in every if x.operation == "fusion" for name in x.calls("calls")}

    def written(self) -> Iterator[Instruction]:
        """Each instruction of the text that has a buffer: all but those inside a fusion."""
        for name, computation in self.computations.items():
            if name not in self.fused:
                yield from computation.values()


@dataclass(frozen=True)
class Walk:
    """An execution of a module: of branches the one that touches the fewest bytes is taken, or with `dearest`
    the most.

    A loop whose number of trips only the device knows is one over a pool's blocks if it carries one layer's
    pools; others take `steps`.
    """

    module: Module
    pools: tuple[PoolBuffer, ...] = ()
    steps: int = 1
    dearest: bool = False

    @cached_property
    def runs(self) -> list[ExecutedInstruction]:
        return self.inlined(self.module.entry)

    @cached_property
    def bytes(self) -> int:
        return total(self.runs)

    def inlined(self, name: str) -> list[ExecutedInstruction]:
        """Return the instructions that a computation executes, with those of all computations it calls."""
        computation, found = self.module.computations[name], []
        for x in computation.values():
            if x.operation == "while":
                found += repeated(self.inlined(x.calls("body")[0]), self.trips(computation, x))
            elif x.operation == "conditional":
                roles = "branch_computations", "true_computation", "false_computation"
                found += (max if self.dearest else min)(map(self.inlined, x.calls(*roles)), key=total)
            elif x.operation in ("call", "call-start", "async-start"):
                found += [run for callee in x.calls("to_apply", "calls") for run in self.inlined(callee)]
            else:
                found.append(ExecutedInstruction(x, 1, self.touched(computation, x)))
        return found

    def trips(self, computation: Computation, loop: Instruction) -> int:
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest):
            return int(known[1])
        if (bound := constant_bound(self.module.computations[loop.calls("condition")[0]])) is not None:
            return bound
        body = self.module.computations[loop.calls("body")[0]]
        sizes = {pool.bytes: pool for pool in self.pools}
        carried = [sizes[n] for n in map(nbytes, buffers(loop.kind)) if n in sizes]
        inner = all(x.operation != "while" for x in body.values())
        one_layer = inner and len(carried) <= max((pool.arrays for pool in carried), default=-1)
        return max(pool.blocks for pool in carried) if one_layer else self.steps

    # ------------------------------------------------------------ one instruction

    def touched(self, computation: Computation, x: Instruction) -> int:
        """Bytes of main memory that an instruction reads and writes."""
        operation = x.operation.removesuffix("-start")
        if operation in FREE or operation.endswith(("-done", "-update")):
            return 0
        operands = [computation[name].kind for name in x.operands]
        if operation == "fusion":
            return self.fusion(x, operands)
        if operation == "custom-call":
            return self.custom_call(x, operands)
        if operation in PARTS:
            part = buffers(x.kind)[-2 if operation != x.operation else -1]
            return here(operands[0]) * nbytes(part) + nbytes(part) * here(part) + sum(map(held, operands[1:]))
        if operation in UPDATES:
            return 2 * sum(map(held, operands[UPDATES[operation] :]))
        if x.operation == "copy-start":
            return 0 if prefetched(computation, x) else held(x.kind)
        return sum(map(held, operands)) + held(result(x, operands))

    def custom_call(self, x: Instruction, operands: list[str]) -> int:
        """A kernel: a scope's name may say its bytes. Else it reads the live pages of a pool, and writes
        those of one that it gives back in place; else its estimate, or its operands and results, count."""
        if said := re.search(r"bytes_accessed:(\d+)", x.rest):
            return int(said[1])
        live = {pool.bytes: pool.live for pool in self.pools}
        estimate = re.search(r'"?bytes_accessed"?:\s*"?(\d+)', x.rest)
        if estimate and not any(nbytes(kind) in live for kind in operands):
            return int(estimate[1])
        aliased = set(re.findall(r"\{(\d*)\}: \(\d+, \{", x.rest))
        others = enumerate(buffers(x.kind))
        results = [own for i, own in others if nbytes(own) in live or aliased.isdisjoint({str(i), ""})]
        return sum(live.get(nbytes(kind), held(kind)) for kind in (*operands, *results))

    def fusion(self, x: Instruction, operands: list[str]) -> int:
        inner = self.module.computations[x.calls("calls")[0]]
        reads = sum(here(kind) * self.read(inner, i) for i, kind in enumerate(operands))
        results, roots = buffers(x.kind), outputs(inner)
        if len(results) != len(roots):  # another fusion, or a custom call, returns them all
            return reads + held(x.kind)
        return reads + sum(here(kind) * write(inner, root) for kind, root in zip(results, roots, strict=True))

    def read(self, computation: Computation, index: int) -> int:
        """Bytes that a fused computation reads of its parameter of that index."""
        parameter = next(
            x for x in computation.values() if x.operation == "parameter" and x.inside == str(index)
        )
        return min(nbytes(parameter.kind), self.uses(computation, parameter.name, in_place(computation)))

    def uses(self, computation: Computation, name: str, updated: set[str]) -> int:
        value, found = computation[name], 0
        if any(value is x for x in outputs(computation)):
            return nbytes(value.kind)
        for x in computation.values():
            operands = x.operands
            if name not in operands:
                continue
            if x.operation == "bitcast":
                found += self.uses(computation, x.name, updated)
            elif x.operation in PARTS and name not in operands[1:]:
                found += nbytes(x.kind)
            elif x.name in updated and operands.index(name) == 0:
                pass
            elif x.operation == "fusion":
                inner = self.module.computations[x.calls("calls")[0]]
                found += sum(self.read(inner, i) for i, operand in enumerate(operands) if operand == name)
            else:
                return nbytes(value.kind)
        return found


def total(runs: Iterable[ExecutedInstruction]) -> int:
    return sum(run.times * run.bytes for run in runs)


def repeated(runs: list[ExecutedInstruction], times: int) -> list[ExecutedInstruction]:
    return [run._replace(times=run.times * times) for run in runs]


def prefetched(computation: Computation, copy: Instruction) -> bool:
    """Tell if the previous call made this copy: a TPU's program may end with the first copy of the next."""
    if "cross_program_prefetch" not in copy.rest:
        return False
    return any(
        x.operation == "copy-start" and x.inside == copy.inside and x is not copy
        for x in computation.values()
    )


def constant_bound(condition: Computation) -> int | None:
    """n of a loop while i < n, which starts at zero as all of jax's do; None for another condition."""
    root = next(x for x in condition.values() if x.root)
    if root.operation != "compare" or "direction=LT" not in root.rest:
        return None
    bound = condition[root.operands[1]]
    return int(bound.inside) if bound.operation == "constant" else None


# ---------------------------------------------------------------- inside a fusion


def outputs(computation: Computation) -> list[Instruction]:
    """Return the results of a fused computation: its root, or the parts of a tuple."""
    root = next(x for x in computation.values() if x.root)
    return [computation[name] for name in root.operands] if root.operation == "tuple" else [root]


def chain(computation: Computation, x: Instruction) -> Iterator[Instruction]:
    """An output and the updates that it is made of, the last first."""
    while x.operation == "bitcast" or x.operation in UPDATES:
        yield x
        x = computation[x.operands[0]]


def in_place(computation: Computation) -> set[str]:
    return {x.name for root in outputs(computation) for x in chain(computation, root)}


def write(computation: Computation, root: Instruction) -> int:
    """Bytes that an output writes: of updates in place, what is new."""
    updates = [x for x in chain(computation, root) if x.operation in UPDATES]
    if not updates:
        return nbytes(root.kind)
    return sum(
        nbytes(computation[name].kind) for x in updates for name in x.operands[UPDATES[x.operation] :][:1]
    )


# ---------------------------------------------------------------- text


def parsed(line: str, start: re.Match[str]) -> Instruction:
    at = start.end()
    end = closing(line, at) + 1 if line[at] == "(" else line.index(" ", at)
    opened = line.index("(", end)
    closed = closing(line, opened)
    operation, inside = line[end:opened].strip(), line[opened + 1 : closed]
    return Instruction(start[2], line[at:end], operation, inside, line[closed + 1 :], bool(start[1]))


def closing(text: str, start: int) -> int:
    """Where the parenthesis that opens at `start` closes."""
    depth = 0
    for bracket in re.compile(r"[()]").finditer(text, start):
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            return bracket.start()
    raise ValueError(f"a parenthesis does not close in {text[:80]!r}")


def buffers(kind: str) -> list[str]:
    """The types in a tuple of types, or the one type."""
    return [match[0] for match in BUFFER.finditer(kind)]


def sizes_of(kind: str) -> list[int]:
    """The sizes of a type, or of the first in a tuple of types."""
    found = BUFFER.search(kind)
    return [int(n) for n in found[2].split(",") if n] if found else []


def nbytes(kind: str) -> int:
    """Bytes of a type such as bf16[64,8,128] or of a tuple of types, without padding."""
    return sum(
        width(name) * math.prod(int(n) for n in sizes.split(",") if n)
        for name, sizes, _ in BUFFER.findall(kind)
    )


def here(kind: str) -> bool:
    """Tell if a buffer lies in main memory."""
    return not ELSEWHERE.search(kind)


def held(kind: str) -> int:
    """Bytes of a type, or of a tuple of types, in main memory."""
    return sum(nbytes(buffer) for buffer in buffers(kind) if here(buffer))


def result(x: Instruction, operands: Sequence[str]) -> str:
    """The type of an instruction's result; the start of an asynchronous one names its operands before
    it."""
    kinds = buffers(x.kind)
    started = x.operation.endswith("-start") and len(kinds) > len(operands)
    return ", ".join(kinds[len(operands) : 2 * len(operands)]) if started else x.kind


def label(kind: str) -> str:
    """A type without its layout."""
    return ", ".join(f"{name}[{sizes}]" for name, sizes, _ in BUFFER.findall(kind))


def width(name: str) -> int:
    return WIDTHS.get(name, 1 if name.startswith("f8") else 4)

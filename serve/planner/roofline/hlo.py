"""XLA's optimised module read from its text: which instructions run, how often, and the bytes of main memory
that each touches.

A fusion reads its operands and writes its results once, whatever happens inside it. Of an operand that is
only sliced, gathered or updated in place, it touches those parts. These are the rules of XLA's own cost
analysis. That one counts a loop's body once, charges a gather its whole table, and does not exist for absent
GPUs. Buffers in a TPU's vector memory are free.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

BUFFER_TYPE = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\](\{[^}]*\})?")
OTHER_MEMORY = re.compile(r"S\([1-9]")  # a memory space other than main memory
INSTRUCTION_START = re.compile(r"^\s+(ROOT )?%?([\w.-]+) = ")
COMPUTATION_HEAD = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
CALLED_COMPUTATION = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)"
)
FREE_OPERATIONS = (
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier",
    "add-dependency", "partition-id", "replica-id",
)  # fmt: skip
PART_OPERATIONS = ("slice", "dynamic-slice", "gather")
UPDATE_OPERANDS = {"dynamic-update-slice": 1, "scatter": 2}  # index of the operand that is written


class Instruction(NamedTuple):
    """A line of a module.

    type_text: type of its result.
    argument_text: text between its parentheses.
    attribute_text: text behind them.
    root: True if it is its computation's result.
    """

    name: str
    type_text: str
    operation: str
    argument_text: str
    attribute_text: str
    root: bool

    @property
    def operands(self) -> list[str]:
        """Return the names of its operands."""
        return re.findall(r"%([\w.-]+)", self.argument_text)

    def called_computations(self, *roles: str) -> list[str]:
        """Return the computations that it applies in these roles, in the text's order."""
        branches = re.search(r"branch_computations=\{([^}]*)\}", self.attribute_text)
        if branches and "branch_computations" in roles:
            return re.findall(r"%?([\w.-]+)", branches[1])
        return [name for role, name in CALLED_COMPUTATION.findall(self.attribute_text) if role in roles]


Computation = dict[str, Instruction]


class PoolBuffer(NamedTuple):
    """A layer's buffer of pages.

    bytes: of the buffer.
    live_bytes: bytes of pages in use.
    loop_trips: trips of a loop over its keys.
    num_layer_buffers: number of buffers of its layer.
    """

    bytes: int
    live_bytes: int
    loop_trips: int
    num_layer_buffers: int = 2


class ExecutedInstruction(NamedTuple):
    """An instruction that is executed.

    times: number of executions.
    bytes: main memory touched by each.
    """

    instruction: Instruction
    times: int
    bytes: int


@dataclass(frozen=True)
class Module:
    """A program's text.

    computations: by name, each its instructions by name.
    entry: name of the computation that is run.
    devices: number of devices that run it together.
    """

    computations: dict[str, Computation]
    entry: str
    devices: int

    @classmethod
    def parse(cls, text: str) -> "Module":
        """Parse a module's text."""
        computations: dict[str, Computation] = {}
        entry, current = "", {}
        devices = re.search(r"num_partitions=(\d+)", text.partition("\n")[0])
        for line in text.splitlines():
            if head := COMPUTATION_HEAD.match(line):
                current = computations[head[2]] = {}
                entry = head[2] if head[1] else entry
            elif start := INSTRUCTION_START.match(line):
                instruction = parse_instruction(line, start)
                current[instruction.name] = instruction
        return cls(computations, entry, int(devices[1]) if devices else 1)

    @cached_property
    def fused_computations(self) -> set[str]:
        """Return the names of computations inside a fusion. They write no buffer of their own."""
        every = (x for computation in self.computations.values() for x in computation.values())
        return {name for x in every if x.operation == "fusion" for name in x.called_computations("calls")}

    def buffer_instructions(self) -> Iterator[Instruction]:
        """Yield each instruction of the text that writes a buffer, so none inside a fusion."""
        for name, computation in self.computations.items():
            if name not in self.fused_computations:
                yield from computation.values()


@dataclass(frozen=True)
class ModuleExecution:
    """An execution of a module. Of branches it takes the one that touches the fewest bytes, or with
    `takes_costliest_branches` the most.

    pool_buffers: buffers of pages that loops may read.
    default_trips: trips of other loops whose number only the device knows.

    If only the device knows a loop's trips and it carries one layer's pools, it loops over their blocks.
    """

    module: Module
    pool_buffers: tuple[PoolBuffer, ...] = ()
    default_trips: int = 1
    takes_costliest_branches: bool = False

    @cached_property
    def executed_instructions(self) -> list[ExecutedInstruction]:
        """Return all instructions that are executed."""
        return self.inline_calls(self.module.entry)

    @cached_property
    def bytes_accessed(self) -> int:
        """Return the bytes of main memory that are touched."""
        return total_bytes(self.executed_instructions)

    def inline_calls(self, name: str) -> list[ExecutedInstruction]:
        """Return the instructions that a computation executes, including all computations that it calls."""
        computation, runs = self.module.computations[name], []
        for x in computation.values():
            if x.operation == "while":
                runs += repeat_runs(
                    self.inline_calls(x.called_computations("body")[0]), self.loop_trips(computation, x)
                )
            elif x.operation == "conditional":
                roles = "branch_computations", "true_computation", "false_computation"
                runs += (max if self.takes_costliest_branches else min)(
                    map(self.inline_calls, x.called_computations(*roles)), key=total_bytes
                )
            elif x.operation in ("call", "call-start", "async-start"):
                runs += [
                    run
                    for callee in x.called_computations("to_apply", "calls")
                    for run in self.inline_calls(callee)
                ]
            else:
                runs.append(ExecutedInstruction(x, 1, self.instruction_bytes(computation, x)))
        return runs

    def loop_trips(self, computation: Computation, loop_instruction: Instruction) -> int:
        """Return the number of trips of a while loop."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop_instruction.attribute_text):
            return int(known[1])
        if (
            bound := constant_trip_count(
                self.module.computations[loop_instruction.called_computations("condition")[0]]
            )
        ) is not None:
            return bound
        body = self.module.computations[loop_instruction.called_computations("body")[0]]
        sizes = {pool.bytes: pool for pool in self.pool_buffers}
        carried = [sizes[n] for n in map(type_bytes, buffer_types(loop_instruction.type_text)) if n in sizes]
        inner = all(x.operation != "while" for x in body.values())
        one_layer = inner and len(carried) <= max((pool.num_layer_buffers for pool in carried), default=-1)
        return max(pool.loop_trips for pool in carried) if one_layer else self.default_trips

    # ------------------------------------------------------------ one instruction

    def instruction_bytes(self, computation: Computation, x: Instruction) -> int:
        """Return the bytes of main memory that an instruction reads and writes."""
        operation = x.operation.removesuffix("-start")
        if operation in FREE_OPERATIONS or operation.endswith(("-done", "-update")):
            return 0
        operands = [computation[name].type_text for name in x.operands]
        if operation == "fusion":
            return self.fusion_bytes(x, operands)
        if operation == "custom-call":
            return self.custom_call_bytes(x, operands)
        if operation in PART_OPERATIONS:
            part = buffer_types(x.type_text)[-2 if operation != x.operation else -1]
            return (
                is_in_main_memory(operands[0]) * type_bytes(part)
                + type_bytes(part) * is_in_main_memory(part)
                + sum(map(main_memory_bytes, operands[1:]))
            )
        if operation in UPDATE_OPERANDS:
            return 2 * sum(map(main_memory_bytes, operands[UPDATE_OPERANDS[operation] :]))
        if x.operation == "copy-start":
            return 0 if is_prefetched(computation, x) else main_memory_bytes(x.type_text)
        return sum(map(main_memory_bytes, operands)) + main_memory_bytes(result_type(x, operands))

    def custom_call_bytes(self, x: Instruction, operands: list[str]) -> int:
        """Return the bytes that a kernel touches. The name of a scope may state them. Else a kernel with a
        pool reads its live pages, and writes them if it returns the pool in place. For others the kernel's
        estimate counts, or its operands and results."""
        if stated := re.search(r"bytes_accessed:(\d+)", x.attribute_text):
            return int(stated[1])
        live = {pool.bytes: pool.live_bytes for pool in self.pool_buffers}
        estimate = re.search(r'"?bytes_accessed"?:\s*"?(\d+)', x.attribute_text)
        if estimate and not any(type_bytes(kind) in live for kind in operands):
            return int(estimate[1])
        aliased = set(re.findall(r"\{(\d*)\}: \(\d+, \{", x.attribute_text))
        others = enumerate(buffer_types(x.type_text))
        results = [
            buffer for i, buffer in others if type_bytes(buffer) in live or aliased.isdisjoint({str(i), ""})
        ]
        return sum(live.get(type_bytes(kind), main_memory_bytes(kind)) for kind in (*operands, *results))

    def fusion_bytes(self, x: Instruction, operands: list[str]) -> int:
        """Return the bytes of main memory that a fusion reads and writes."""
        inner = self.module.computations[x.called_computations("calls")[0]]
        reads = sum(
            is_in_main_memory(kind) * self.parameter_bytes(inner, i) for i, kind in enumerate(operands)
        )
        results, roots = buffer_types(x.type_text), fusion_outputs(inner)
        if len(results) != len(roots):  # a nested fusion or a custom call returns all of them
            return reads + main_memory_bytes(x.type_text)
        return reads + sum(
            is_in_main_memory(kind) * written_bytes(inner, root)
            for kind, root in zip(results, roots, strict=True)
        )

    def parameter_bytes(self, computation: Computation, index: int) -> int:
        """Return the bytes that a fused computation reads of its parameter `index`."""
        parameter = next(
            x for x in computation.values() if x.operation == "parameter" and x.argument_text == str(index)
        )
        return min(
            type_bytes(parameter.type_text),
            self.use_bytes(computation, parameter.name, updated_names(computation)),
        )

    def use_bytes(self, computation: Computation, name: str, updated: set[str]) -> int:
        """Return the bytes of a value that its uses read. Operands updated in place are not read."""
        value, read_bytes = computation[name], 0
        if any(value is x for x in fusion_outputs(computation)):
            return type_bytes(value.type_text)
        for x in computation.values():
            operands = x.operands
            if name not in operands:
                continue
            if x.operation == "bitcast":
                read_bytes += self.use_bytes(computation, x.name, updated)
            elif x.operation in PART_OPERATIONS and name not in operands[1:]:
                read_bytes += type_bytes(x.type_text)
            elif x.name in updated and operands.index(name) == 0:
                pass
            elif x.operation == "fusion":
                inner = self.module.computations[x.called_computations("calls")[0]]
                read_bytes += sum(
                    self.parameter_bytes(inner, i) for i, operand in enumerate(operands) if operand == name
                )
            else:
                return type_bytes(value.type_text)
        return read_bytes


def total_bytes(runs: Iterable[ExecutedInstruction]) -> int:
    """Return the bytes that all executions touch."""
    return sum(run.times * run.bytes for run in runs)


def repeat_runs(runs: list[ExecutedInstruction], times: int) -> list[ExecutedInstruction]:
    """Return the executed instructions of a loop of `times` trips."""
    return [run._replace(times=run.times * times) for run in runs]


def is_prefetched(computation: Computation, copy_instruction: Instruction) -> bool:
    """Tell if the previous call made this copy. A TPU's program may end with the first copy of the next
    call."""
    if "cross_program_prefetch" not in copy_instruction.attribute_text:
        return False
    return any(
        x.operation == "copy-start"
        and x.argument_text == copy_instruction.argument_text
        and x is not copy_instruction
        for x in computation.values()
    )


def constant_trip_count(condition: Computation) -> int | None:
    """Return n of a loop while i < n, which starts at zero as all of jax's do. Return None for another
    condition."""
    root = next(x for x in condition.values() if x.root)
    if root.operation != "compare" or "direction=LT" not in root.attribute_text:
        return None
    bound = condition[root.operands[1]]
    return int(bound.argument_text) if bound.operation == "constant" else None


# ---------------------------------------------------------------- inside a fusion


def fusion_outputs(computation: Computation) -> list[Instruction]:
    """Return the results of a fused computation: its root, or the parts of a tuple."""
    root = next(x for x in computation.values() if x.root)
    return [computation[name] for name in root.operands] if root.operation == "tuple" else [root]


def update_chain(computation: Computation, x: Instruction) -> Iterator[Instruction]:
    """Yield an output and the in-place updates that it is made of, the last first."""
    while x.operation == "bitcast" or x.operation in UPDATE_OPERANDS:
        yield x
        x = computation[x.operands[0]]


def updated_names(computation: Computation) -> set[str]:
    """Return the names of the instructions that update an output in place."""
    return {x.name for root in fusion_outputs(computation) for x in update_chain(computation, root)}


def written_bytes(computation: Computation, root_instruction: Instruction) -> int:
    """Return the bytes that an output writes. For updates in place only the new parts count."""
    updates = [x for x in update_chain(computation, root_instruction) if x.operation in UPDATE_OPERANDS]
    if not updates:
        return type_bytes(root_instruction.type_text)
    return sum(
        type_bytes(computation[name].type_text)
        for x in updates
        for name in x.operands[UPDATE_OPERANDS[x.operation] :][:1]
    )


# ---------------------------------------------------------------- text


def parse_instruction(line: str, start: re.Match[str]) -> Instruction:
    """Parse a line whose name `start` has matched."""
    type_start = start.end()
    end = find_closing(line, type_start) + 1 if line[type_start] == "(" else line.index(" ", type_start)
    opened = line.index("(", end)
    closed = find_closing(line, opened)
    operation, inside = line[end:opened].strip(), line[opened + 1 : closed]
    return Instruction(start[2], line[type_start:end], operation, inside, line[closed + 1 :], bool(start[1]))


def find_closing(text: str, start: int) -> int:
    """Return the index of the parenthesis that closes the one at `start`."""
    depth = 0
    for bracket in re.compile(r"[()]").finditer(text, start):
        depth += 1 if bracket[0] == "(" else -1
        if not depth:
            return bracket.start()
    raise ValueError(f"a parenthesis does not close in {text[:80]!r}")


def buffer_types(kind: str) -> list[str]:
    """Split a tuple of types; a plain type is returned alone."""
    return [match[0] for match in BUFFER_TYPE.finditer(kind)]


def type_shape(kind: str) -> list[int]:
    """Return the dimensions of a type, or of the first type in a tuple."""
    match = BUFFER_TYPE.search(kind)
    return [int(n) for n in match[2].split(",") if n] if match else []


def type_bytes(kind: str) -> int:
    """Return the bytes of a type such as bf16[64,8,128], or of a tuple of types, without padding."""
    return sum(
        -(-element_bits(name) * math.prod(int(n) for n in sizes.split(",") if n) // 8)
        for name, sizes, _ in BUFFER_TYPE.findall(kind)
    )


def is_in_main_memory(kind: str) -> bool:
    """Tell if a buffer lies in main memory."""
    return not OTHER_MEMORY.search(kind)


def main_memory_bytes(kind: str) -> int:
    """Return the bytes of a type, or of a tuple of types, that are in main memory."""
    return sum(type_bytes(buffer) for buffer in buffer_types(kind) if is_in_main_memory(buffer))


def result_type(x: Instruction, operands: Sequence[str]) -> str:
    """Return the type of an instruction's result. The start of an asynchronous one names its operands before
    it."""
    kinds = buffer_types(x.type_text)
    is_start = x.operation.endswith("-start") and len(kinds) > len(operands)
    return ", ".join(kinds[len(operands) : 2 * len(operands)]) if is_start else x.type_text


def type_label(kind: str) -> str:
    """Return a type without its layout."""
    return ", ".join(f"{name}[{sizes}]" for name, sizes, _ in BUFFER_TYPE.findall(kind))


def element_bits(name: str) -> int:
    """Return the bits of one number of an element type such as bf16, s4 or f8e4m3fn, as arrays store it."""
    bits = re.search(r"\d+", name)
    return int(bits[0]) if bits else 8 if name == "pred" else 32

"""Which parts of a program a GPU runs without its host: XLA's thunk sequence, read from the compiler's dump.

A command buffer (a CUDA graph) is one launch. Outside of them the host launches every kernel. It waits for
the predicate of each conditional. It also waits at each trip of a loop, unless the number of trips is known.
A compiler for an absent GPU shows all of it.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import jax

THUNK_LINE = re.compile(r"^( *)(\d+): k(\w+)", re.MULTILINE)
THUNK_ANNOTATION = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')
COUNTED_LOOP = re.compile(r"%?([\w.-]+) = [^\n]* while\([^\n]*known_trip_count")
# The first exists if passes changed the sequence.
DUMP_FILES = ("thunk_sequence_after_thunk_passes", "thunk_sequence")
WAITING_KINDS = ("Conditional", "While")
KERNEL_KINDS = ("Kernel", "CustomKernel", "CustomCall", "Gemm", "CublasLtMatmul", "CuDnn")


class Thunk(NamedTuple):
    """A line of a thunk sequence.

    number: its id.
    kind: such as "Kernel" or "While".
    enclosing_kinds: kinds of the thunks around it, the outermost first.
    """

    number: int
    kind: str
    enclosing_kinds: tuple[str, ...]

    @property
    def is_captured(self) -> bool:
        """Tell if a command buffer has it."""
        return "CommandBuffer" in self.enclosing_kinds


@dataclass(frozen=True)
class ThunkCounts:
    """Launches of a program.

    buffers: command buffers.
    read_backs: conditionals and loops whose predicates the host reads back, in a loop at each trip.
    kernels: kernels outside of branches; those of a loop count once.
    """

    buffers: int
    read_backs: int
    kernels: int

    def __str__(self) -> str:
        buffers = "1 command buffer" if self.buffers == 1 else f"{self.buffers} command buffers"
        what = f"{buffers}, {self.kernels} kernels outside of branches"
        return f"{what}, the host reads back {self.read_backs} predicates"


def compile_with_thunks(
    lowered: jax.stages.Lowered, options: Mapping[str, str | bool] | None = None
) -> tuple[jax.stages.Compiled, ThunkCounts | None]:
    """Compile a program with options of XLA besides its flags, and return its thunks too. They are None if
    the compiler dumps none (TPUs, CPUs), or if jax's cache had the program."""
    with TemporaryDirectory(prefix="duetto-thunks-") as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, **(options or {})})
        sequences = [text for name in DUMP_FILES if (text := read_dump(folder, name))]
        metadata = read_dump(folder, "thunk_metadata")
    counted_loops = set(COUNTED_LOOP.findall(compiled.as_text() or ""))
    counted_numbers = {
        int(number) for name, number in THUNK_ANNOTATION.findall(metadata) if name in counted_loops
    }
    return compiled, count_thunks(sequences[0], counted_numbers) if sequences else None


def read_dump(folder: str, name: str) -> str:
    """Read the files of a dump that have a name."""
    return "".join(path.read_text() for path in Path(folder).glob(f"*.{name}.txt"))


def count_thunks(sequence: str, counted_numbers: Collection[int] = ()) -> ThunkCounts:
    """Count the launches of a sequence; `counted_numbers` are the numbers of loops whose trips the host
    knows."""
    every = list(parse_thunks(sequence))
    waits = [
        x for x in every if x.kind in WAITING_KINDS and not x.is_captured and x.number not in counted_numbers
    ]
    kernels = [x for x in every if x.kind in KERNEL_KINDS and "Conditional" not in x.enclosing_kinds]
    return ThunkCounts(sum(x.kind == "CommandBuffer" for x in every), len(waits), len(kernels))


def parse_thunks(sequence: str) -> Iterator[Thunk]:
    """Yield the thunks of a sequence. Its indentation shows which thunk is inside which."""
    enclosing: list[tuple[int, str]] = []
    for indent, number, kind in THUNK_LINE.findall(sequence):
        enclosing = [(at, outer) for at, outer in enclosing if at < len(indent)]
        yield Thunk(int(number), kind, tuple(outer for _, outer in enclosing))
        enclosing.append((len(indent), kind))

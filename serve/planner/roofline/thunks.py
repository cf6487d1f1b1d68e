"""Which parts of a program a GPU runs without its host: XLA's thunk sequence, read from the compiler's dump.

A command buffer (a CUDA graph) is one launch. Outside of them the host launches every kernel, and waits for
the predicate of a conditional, and of a loop at each turn unless it knows how often that turns. A compiler
for a GPU that is not there shows all of it.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import jax

LINE = re.compile(r"^( *)(\d+): k(\w+)", re.MULTILINE)
ANNOTATED = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')
COUNTED = re.compile(r"%?([\w.-]+) = [^\n]* while\([^\n]*known_trip_count")
FILES = ("thunk_sequence_after_thunk_passes", "thunk_sequence")  # the former where they changed something
WAITS = ("Conditional", "While")
KERNELS = ("Kernel", "CustomKernel", "CustomCall", "Gemm", "CublasLtMatmul", "CuDnn")


class Thunk(NamedTuple):
    """A line of a sequence, and the kinds of those that it stands in, from the outermost in."""

    number: int
    kind: str
    inside: tuple[str, ...]

    @property
    def captured(self) -> bool:
        return "CommandBuffer" in self.inside


@dataclass(frozen=True)
class Thunks:
    """Launches of a program.

    buffers: command buffers.
    read_backs: conditionals and loops whose predicates the host reads back, those of a loop at each turn.
    kernels: kernels outside of branches, those of a loop once.
    """

    buffers: int
    read_backs: int
    kernels: int

    def __str__(self) -> str:
        buffers = "1 command buffer" if self.buffers == 1 else f"{self.buffers} command buffers"
        what = f"{buffers}, {self.kernels} kernels outside of branches"
        return f"{what}, the host reads back {self.read_backs} predicates"


def compile_thunks(
    lowered: jax.stages.Lowered, options: Mapping[str, str | bool] | None = None
) -> tuple[jax.stages.Compiled, Thunks | None]:
    """A program compiled with these options of XLA beside its flags, and its thunks; None where a compiler
    dumps none, as those of TPUs and CPUs, and where jax's cache had the program."""
    with TemporaryDirectory(prefix="duetto-thunks-") as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder, **(options or {})})
        sequences = [text for name in FILES if (text := dumped(folder, name))]
        metadata = dumped(folder, "thunk_metadata")
    counted = set(COUNTED.findall(compiled.as_text() or ""))
    known = {int(number) for name, number in ANNOTATED.findall(metadata) if name in counted}
    return compiled, count(sequences[0], known) if sequences else None


def dumped(folder: str, name: str) -> str:
    """The text of the files of a dump that have a name."""
    return "".join(path.read_text() for path in Path(folder).glob(f"*.{name}.txt"))


def count(sequence: str, known: Collection[int] = ()) -> Thunks:
    """Read a sequence; `known` are the numbers of loops whose turns the host knows."""
    every = list(read(sequence))
    waits = [x for x in every if x.kind in WAITS and not x.captured and x.number not in known]
    kernels = [x for x in every if x.kind in KERNELS and "Conditional" not in x.inside]
    return Thunks(sum(x.kind == "CommandBuffer" for x in every), len(waits), len(kernels))


def read(sequence: str) -> Iterator[Thunk]:
    """The lines of a sequence, whose indentation says what stands in what."""
    above: list[tuple[int, str]] = []
    for indent, number, kind in LINE.findall(sequence):
        above = [(at, outer) for at, outer in above if at < len(indent)]
        yield Thunk(int(number), kind, tuple(outer for _, outer in above))
        above.append((len(indent), kind))

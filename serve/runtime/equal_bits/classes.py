"""Compiled shapes that give the same bits, and their times. All shapes are run before they serve.

A row of a matrix product depends on the number of rows only through the kernel that the compiler picks for
it. So shapes fall into classes. Within a class, a request's bits do not depend on the shapes that compute its
tokens.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from ...host import progress
from ..compiled import executable_cache
from ..compiled.local_executor import LocalExecutor
from ..compiled.lowering import StepArguments
from ..compiled.program_table import ProgramTable
from ..compiled.shapes import PHASES, CanonicalShapes, Shape
from .probe import Probe

T = TypeVar("T")


@dataclass(frozen=True)
class ShapeClasses:
    """Shapes that may serve together, by phase.

    same_bits: True if prefill and decode write the same bits.
    """

    prefill: tuple[Shape, ...]
    decode: tuple[Shape, ...]
    same_bits: bool
    verify: tuple[Shape, ...] = ()

    @classmethod
    def from_shapes(cls, shapes: Iterable[Shape], same_bits: bool) -> "ShapeClasses":
        """Sort shapes by phase."""
        by_phase = {phase: tuple(s for s in sorted(shapes) if s.phase == phase) for phase in PHASES}
        return cls(**by_phase, same_bits=same_bits)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Shapes of all phases."""
        return (*self.prefill, *self.decode, *self.verify)

    @property
    def single_step_shapes(self) -> tuple[Shape, ...]:
        """Shapes of decode with one step in a dispatch."""
        return tuple(s for s in self.decode if s.tokens == 1)

    def with_shape(self, shape: Shape) -> "ShapeClasses":
        """Return the classes with one more shape."""
        return ShapeClasses.from_shapes([*self.shapes, shape], self.same_bits)


def load_or_probe_classes(
    executor: LocalExecutor, arguments: StepArguments, canonical: CanonicalShapes, reproducible: bool
) -> tuple[ShapeClasses, StepArguments]:
    """Return the shapes that may serve together, and the step's arguments.

    Under the reproducibility contract these shapes have the bits of the canonical ones. They are compared
    now, or read from an earlier start. Without the contract they are all shapes.
    """
    if not reproducible:
        return ShapeClasses.from_shapes(executor.programs.steps, same_bits=True), arguments
    key = classes_key(executor.programs, arguments.params, canonical)
    # programs that were compiled now may have other bits
    stored = executable_cache.read_record(key, ShapeClasses) if executor.programs.are_all_stored else None
    if stored is not None:
        return stored, arguments
    classes, arguments = probe_classes(executor, arguments, canonical)
    executable_cache.write_record(key, classes)
    return classes, arguments


def classes_key(programs: ProgramTable, params: Any, canonical: CanonicalShapes) -> str | None:
    """Return the key under which the classes are stored; None if they cannot be stored."""
    if programs.key is None or executable_cache.program_folder() is None:
        return None
    return executable_cache.combine_keys([programs.key], hash_param_rows(params), canonical)


def hash_param_rows(params: Any) -> str:
    """Return a hash of one row of each parameter."""
    hasher = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        hasher.update(np.asarray(leaf[(0,) * max(leaf.ndim - 1, 0)]).tobytes())
    return hasher.hexdigest()


def run_in_idle_engine(
    executor: LocalExecutor,
    arguments: StepArguments,
    canonical: CanonicalShapes,
    work: Callable[[Probe], T],
) -> tuple[T, StepArguments]:
    """Do a probe's work in an idle engine, whose cache it overwrites. Returns the result, and the step's
    arguments."""
    probe = Probe(executor, canonical, executor.programs.steps)
    pages = [list(range(probe.needed_pages))] * len(executor.programs.sizes.pages)
    return probe.run(arguments, pages, work)


def probe_classes(
    executor: LocalExecutor, arguments: StepArguments, canonical: CanonicalShapes
) -> tuple[ShapeClasses, StepArguments]:
    """Compare every shape with the canonical shape of its phase. Returns the shapes that agree, and the
    step's arguments."""
    shapes = sorted(executor.programs.steps)
    with progress.show_stage("probing which programs give the same bits", len(shapes)) as done:

        def compare_shapes(probe: Probe) -> ShapeClasses:
            agreeing = [shape for shape in shapes if done(probe.matches_canonical(shape))]
            return ShapeClasses.from_shapes(agreeing, probe.does_prefill_match_decode())

        return run_in_idle_engine(executor, arguments, canonical, compare_shapes)


def measure_step_seconds(
    executor: LocalExecutor,
    arguments: StepArguments,
    canonical: CanonicalShapes,
    classes: ShapeClasses,
    depths: Sequence[int],
) -> tuple[dict[tuple[int, int], float], StepArguments]:
    """Measure the seconds of the steps of an idle engine, by the keys of `timed_shapes`. Returns the seconds,
    and the step's arguments."""
    shapes = timed_shapes(classes, depths)
    with progress.show_stage("measuring steps", len(shapes)) as done:

        def time_steps(probe: Probe) -> dict[tuple[int, int], float]:
            return {(size, k): done(probe.time_step(shape, k + 1)) for (size, k), shape in shapes.items()}

        return run_in_idle_engine(executor, arguments, canonical, time_steps)


def timed_shapes(classes: ShapeClasses, depths: Sequence[int]) -> dict[tuple[int, int], Shape]:
    """Return the shape to time for each kind of step, by (size, depth).

    size: number of tokens of the step; of rows for a decode, or if each row has a draft tree.
    depth: number of draft tokens of a row, one of `depths`; 0 for a decode.
    """
    packed = [s for s in classes.verify if s.packed_tokens]
    trees = [s for s in classes.verify if not s.packed_tokens]
    shapes = {(s.rows, 0): s for s in classes.decode if s.tokens == 1}
    shapes |= {
        (s.packed_tokens, k): fewest_rows_shape(packed, s.packed_tokens, k) for s in packed for k in depths
    }
    return shapes | {(s.rows, k): s for s in trees for k in depths}


def fewest_rows_shape(shapes: Sequence[Shape], total: int, k: int) -> Shape:
    """Return the shape of `total` tokens that is full of rows with k draft tokens, with as few rows as
    possible."""
    candidates = [s for s in shapes if s.packed_tokens == total]
    return min(candidates, key=lambda s: (s.rows * (k + 1) < total, s.rows))

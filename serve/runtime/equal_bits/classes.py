"""Compiled shapes that give the same bits, and their times: found by running all of them before they serve.

A row of a matrix product depends on the number of rows only through the kernel that the compiler picks for
it. So shapes fall into classes; within one, a request's bits do not depend on the shapes that its tokens
happened to run in.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ...host import progress
from ..compiled import executable_cache
from ..compiled.compile import Programs, StepArguments
from ..compiled.shapes import PHASES, Canonical, Shape
from .probe import Probe, Runs, finish


@dataclass(frozen=True)
class ShapeClasses:
    """Shapes that may serve together. same_bits: prefill and decode write the same bits."""

    prefill: tuple[Shape, ...]
    decode: tuple[Shape, ...]
    same_bits: bool
    verify: tuple[Shape, ...] = ()
    deferred: tuple[Shape, ...] = ()

    @classmethod
    def of(cls, shapes: Iterable[Shape], same_bits: bool) -> "ShapeClasses":
        of = {phase: tuple(s for s in sorted(shapes) if s.phase == phase) for phase in PHASES}
        return cls(**of, same_bits=same_bits)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (*self.prefill, *self.decode, *self.verify, *self.deferred)

    @property
    def single_steps(self) -> tuple[Shape, ...]:
        """Decodes of one step in a dispatch."""
        return tuple(s for s in self.decode if s.tokens == 1)

    @property
    def may_defer(self) -> bool:
        """True if each decode of one step has a twin that draws later."""
        return bool(self.decode) and {s.deferred for s in self.single_steps} == {*self.deferred}

    def joined(self, shape: Shape) -> "ShapeClasses":
        return ShapeClasses.of([*self.shapes, shape], self.same_bits)


def choose_classes(
    programs: Programs, arguments: StepArguments, canonical: Canonical, reproducible: bool
) -> tuple[ShapeClasses, StepArguments]:
    """Return the shapes that may serve together: under the reproducibility contract those with the bits of
    the canonical ones, which a start finds or reads from an earlier one; else all."""
    if not reproducible:
        return ShapeClasses.of(programs.steps, same_bits=True), arguments
    own = record(programs, arguments.params, canonical)
    if programs.loaded and (
        known := executable_cache.read(own, ShapeClasses)
    ):  # new programs may have other bits
        return known, arguments
    classes, arguments = find_classes(programs, arguments, canonical)
    executable_cache.write(own, classes)
    return classes, arguments


def record(programs: Programs, params: Any, canonical: Canonical) -> str | None:
    if programs.key is None or executable_cache.folder() is None:
        return None
    return executable_cache.combined([programs.key], fingerprint(params), canonical)


def fingerprint(params: Any) -> str:
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        found.update(np.asarray(leaf[(0,) * max(leaf.ndim - 1, 0)]).tobytes())
    return found.hexdigest()


def probing(
    programs: Programs, arguments: StepArguments, canonical: Canonical, work: Callable[[Probe], Runs[Any]]
) -> tuple[Any, StepArguments]:
    """Run a probe's work in an idle engine; its cache is scratch."""
    probe = Probe(programs, canonical, programs.steps)
    probe.lent = [list(range(probe.needed))] * len(programs.sizes.pages)
    probe.take(arguments.params, arguments.cache)
    found = finish(work(probe))
    return found, replace(arguments, cache=probe.give())


def find_classes(
    programs: Programs, arguments: StepArguments, canonical: Canonical
) -> tuple[ShapeClasses, StepArguments]:
    """Compare every shape with the canonical one of its phase."""
    with progress.stage("probing which programs give the same bits", len(programs.steps)) as done:

        def work(probe: Probe) -> Runs[ShapeClasses]:
            agreeing = []
            for shape in sorted(programs.steps):
                if done((yield from probe.agrees(shape))):
                    agreeing.append(shape)
            return ShapeClasses.of(agreeing, (yield from probe.same_bits()))

        return probing(programs, arguments, canonical, work)


def step_seconds(
    programs: Programs,
    arguments: StepArguments,
    canonical: Canonical,
    classes: ShapeClasses,
    depths: Sequence[int],
) -> tuple[dict[tuple[int, int], float], StepArguments]:
    """Run `timed` in an idle engine."""
    with progress.stage("measuring steps", len(timed_shapes(classes, depths))) as done:
        return probing(programs, arguments, canonical, lambda probe: timed(probe, classes, depths, done))


def timed(
    probe: Probe, classes: ShapeClasses, depths: Sequence[int], done: Callable[[float], float] = float
) -> Runs[dict[tuple[int, int], float]]:
    """Return the seconds of each call, by its tokens and the most guesses of a row, one of `depths`; 0 for a
    decode. Where each row has a tree of guesses, its rows stand in place of its tokens."""
    seconds = {}
    for (size, k), shape in timed_shapes(classes, depths).items():
        seconds[size, k] = done((yield from probe.seconds(shape, k + 1)))
    return seconds


def timed_shapes(classes: ShapeClasses, depths: Sequence[int]) -> dict[tuple[int, int], Shape]:
    """Return the shape to time for each kind of step."""
    packed = [s for s in classes.verify if s.packed]
    trees = [s for s in classes.verify if not s.packed]
    found = {(s.rows, 0): s for s in classes.decode if s.tokens == 1}
    found |= {(s.packed, k): fullest(packed, s.packed, k) for s in packed for k in depths}
    return found | {(s.rows, k): s for s in trees for k in depths}


def fullest(shapes: Sequence[Shape], total: int, k: int) -> Shape:
    """Return the shape of `total` tokens that takes the longest rows of k draft tokens, with as few rows as
    possible."""
    fitting = [s for s in shapes if s.packed == total]
    return min(fitting, key=lambda s: (s.rows * (k + 1) < total, s.rows))

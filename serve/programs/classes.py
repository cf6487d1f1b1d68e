"""Which compiled shapes give the same bits, and how long they take: found by running all of them before they
serve.

A matrix product's rows depend on its number of rows only through the kernel that the compiler picks for it.
So shapes fall into classes; within one, a request's bits do not depend on the shapes that its tokens happened
to run in.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from ..host import progress
from . import kept
from .compile import Arguments, Programs
from .probe import Probe, Runs, finish
from .shapes import Canonical, Shape, doublings, smallest


@dataclass(frozen=True)
class Classes:
    """The shapes that may serve together, and whether prefill and decode write the same bits."""

    prefill: tuple[Shape, ...]
    decode: tuple[Shape, ...]
    same_bits: bool
    verify: tuple[Shape, ...] = ()

    @classmethod
    def of(cls, shapes: Iterable[Shape], same_bits: bool) -> "Classes":
        prefill, decode, verify = (
            tuple(s for s in sorted(shapes) if s.phase == phase) for phase in ("prefill", "decode", "verify")
        )
        return cls(prefill, decode, same_bits, verify)

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (*self.prefill, *self.decode, *self.verify)

    def joined(self, shape: Shape) -> "Classes":
        return Classes.of([*self.shapes, shape], self.same_bits)


def choose_classes(
    programs: Programs, arguments: Arguments, canonical: Canonical, reproducible: bool
) -> tuple[Classes, Arguments]:
    """The shapes that may serve together: under the reproducibility contract those with the bits of the
    canonical ones, else all."""
    if reproducible:
        return known_classes(programs, arguments, canonical)
    return Classes.of(programs.steps, same_bits=True), arguments


def known_classes(
    programs: Programs, arguments: Arguments, canonical: Canonical
) -> tuple[Classes, Arguments]:
    """What an earlier start of the same programs with the same parameters has found, or `find_classes`."""
    own = record(programs, arguments.params, canonical)
    if programs.loaded and (known := kept.read(own, Classes)):  # what is compiled anew may have other bits
        return known, arguments
    classes, arguments = find_classes(programs, arguments, canonical)
    kept.write(own, classes)
    return classes, arguments


def record(programs: Programs, params: Any, canonical: Canonical) -> str | None:
    """What the classes of programs with parameters are kept under."""
    if programs.key is None or kept.folder() is None:
        return None
    return kept.combined([programs.key], fingerprint(params), canonical)


def fingerprint(params: Any) -> str:
    """A hash of each parameter's first numbers."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        found.update(np.asarray(leaf[(0,) * max(leaf.ndim - 1, 0)]).tobytes())
    return found.hexdigest()


def probing(
    programs: Programs, arguments: Arguments, canonical: Canonical, work: Callable[[Probe], Runs[Any]]
) -> tuple[Any, Arguments]:
    """What comes of a probe's work in an idle engine; cache and slots are used as scratch."""
    probe = Probe(programs, canonical, programs.steps)
    probe.lent = [list(range(probe.needed))] * len(programs.sizes.pages)
    probe.take(arguments.params, arguments.cache)
    found = finish(work(probe))
    return found, replace(arguments, cache=probe.give())


def find_classes(programs: Programs, arguments: Arguments, canonical: Canonical) -> tuple[Classes, Arguments]:
    """Compare every shape with the canonical one of its phase."""
    with progress.stage("probing which programs give the same bits", len(programs.steps)) as done:

        def work(probe: Probe) -> Runs[Classes]:
            agreeing = []
            for shape in sorted(programs.steps):
                if done((yield from probe.agrees(shape))):
                    agreeing.append(shape)
            return Classes.of(agreeing, (yield from probe.same_bits()))

        return probing(programs, arguments, canonical, work)


def step_seconds(
    programs: Programs, arguments: Arguments, canonical: Canonical, classes: Classes, k: int
) -> tuple[dict[tuple[int, int], float], Arguments]:
    """`timed` in an idle engine."""
    with progress.stage("measuring steps", len(classes.decode) + len(classes.verify)) as done:
        return probing(programs, arguments, canonical, lambda probe: timed(probe, classes, k, done))


def timed(
    probe: Probe, classes: Classes, k: int, done: Callable[[float], float] = float
) -> Runs[dict[tuple[int, int], float]]:
    """Seconds of a step by its rows (1, 2, 4, ... all seats) and the most guesses of a row, of shapes that
    are full.

    Rows beyond what a shape holds take several calls.
    """
    seconds = {}
    for shape in (*classes.decode, *classes.verify):
        seconds[shape] = done((yield from probe.seconds(shape)))
    ks = sorted({0} | {min(s.tokens - 1, k) for s in classes.verify})

    def step(rows: int, guesses: int) -> float:
        shapes = classes.verify if guesses else classes.decode
        most = max(s.rows for s in shapes if s.tokens > guesses)
        full, rest = divmod(rows, most)
        calls = [most] * full + [rest] * (rest > 0)
        return sum(seconds[smallest(shapes, n, guesses + 1)] for n in calls)

    return {(rows, guesses): step(rows, guesses) for rows in doublings(1, probe.capacity) for guesses in ks}

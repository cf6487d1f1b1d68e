"""Warm-up beside serving: the rest of a cold engine's table is compiled by threads, compared with its first
programs between its steps, and added to its classes one by one.

The first programs are the canonical ones, whose bits all others must have, so a shape that joins later
changes no result. Comparing needs pages of the cache, which are lent for as long as one shape takes.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from ....kvcache.pages import KVCache
from ....kvcache.tables import PageTables, Tables
from ...host.streams import first_line, warn
from ..compiled import executable_cache, jaxcache
from ..compiled.compile import THREADS, Programs, StepArguments
from ..compiled.shapes import PHASES, Canonical, Shape
from .classes import ShapeClasses, timed
from .probe import Probe, Runs

PLAIN = "prefill", "decode"  # phases whose missing shapes an engine can do without
PAUSE = 0.02  # seconds between two polls of an engine
TURN = 0.001  # seconds after a run in which a waiting caller can have the engine


# Makes the speculation of these classes and of the times of their steps, as `timed` returns them.
Speculate = Callable[[ShapeClasses, dict[tuple[int, int], float] | None], Any]


class WarmupGoal(NamedTuple):
    """Goal of a warm-up: shapes with the bits of the canonical ones, if `reproducible`, and the times of
    steps whose rows have up to `depths` draft tokens."""

    canonical: Canonical
    reproducible: bool
    depths: tuple[int, ...]


def first_shapes(shapes: Iterable[Shape], canonical: Canonical) -> tuple[Shape, Shape]:
    """Return the smallest set that serves every request: a prefill and a decode, the canonical ones if the
    table has them."""
    prefills = [s for s in shapes if s.phase == "prefill" and s.rows == 1]
    decodes = [s for s in shapes if s.phase == "decode" and s.tokens == 1]
    return (
        canonical.prefill if canonical.prefill in prefills else min(prefills),
        canonical.decode if canonical.decode in decodes else max(decodes),
    )


def in_turn(shapes: Collection[Shape]) -> list[Shape]:
    """Return the order of compilation: of each phase the largest first, since those save most calls."""
    phases = [sorted((s for s in shapes if s.phase == p), key=lambda s: -s.area) for p in reversed(PHASES)]
    return [shape for each in zip_longest(*phases) for shape in each if shape is not None]


class Warmup:
    """Compiles and compares those of `shapes` that an engine with `classes` lacks.

    The engine calls `advance` between its steps. `classes` grow. Once `done`, `speculation` is what
    `speculate` makes of them and of the times of steps, if those were wanted. A shape that fails is left out
    and noted in `failed`. The final classes are kept under `record`.

    While the engine serves, a shape is compiled if the engine has set it as `wanted`, and all are if it is
    `idle`. Shapes of verification and of deferred draws are compiled at once: the engine waits until all are
    there.
    """

    def __init__(
        self,
        programs: Programs,
        shapes: Collection[Shape],
        classes: ShapeClasses,
        aim: WarmupGoal,
        speculate: Speculate,
        record: str | None = None,
    ):
        self.programs, self.classes, self.aim, self.speculate = programs, classes, aim, speculate
        self.speculation: Any = None
        self.failed: dict[Shape, str] = {}
        self.done = self.stopped = False
        self._record, self._shapes = record, {*programs.steps, *shapes}
        self._missing = in_turn([s for s in shapes if s not in programs.steps])
        self._waited_for = any(s.phase not in PLAIN for s in shapes)
        self.wanted: Shape | None = None
        self.idle, self._prepared = False, False
        self._compiling = len(self._missing)
        self._here = deque(s for s in shapes if s in programs.steps and s not in classes.shapes)
        self._lock = threading.Lock()
        self._probe: Probe | None = None
        self._runs: Runs[None] | None = None
        self._current: Shape | None = None  # that is compared
        self._lent: Tables = []

    # ------------------------------------------------------------ compiling, in threads

    def begin(self, idle: Callable[[], bool]) -> None:
        """Start to compile. One of the threads also calls `idle` until all is done: there an engine with
        nothing else to do may advance, and returns whether it did."""
        threads = max(1, min((executable_cache.cores() or 2) // 2, self._compiling))
        targets = [partial(self._attend, idle), *[self._compile] * (threads - 1)]
        for number, target in enumerate(targets):
            threading.Thread(target=target, name=f"{THREADS}-{number}").start()

    def hurry(self) -> None:
        """Compile everything beside serving, because the engine waits for the end."""
        self._waited_for = True

    def stop(self) -> None:
        """Compile nothing more than what is begun, and release the arrays on the device."""
        self.stopped = True
        if self._probe is not None:
            self._probe.rest()

    @property
    def _goes_on(self) -> bool:
        return not (self.stopped or self.done) and threading.main_thread().is_alive()

    def _attend(self, idle: Callable[[], bool]) -> None:
        while self._goes_on:
            if idle():
                time.sleep(TURN)
                continue
            shape = self._take()
            if not self._prepared and (shape or self._here or not self._compiling):
                self._prepared = True
                self._prepare()
            self._add(shape) if shape else time.sleep(PAUSE)
        if self.done:
            idle()  # so that an engine without requests takes the result

    def _compile(self) -> None:
        while self._goes_on and self._missing:
            shape = self._take()
            self._add(shape) if shape else time.sleep(PAUSE)

    def _take(self) -> Shape | None:
        """Return the shape to compile now: the wanted one, or any if nothing serves, or if the engine waits
        for all."""
        with self._lock:
            shape, self.wanted = self.wanted, None
            if self.idle or self._waited_for:
                shape = next(iter(self._missing), None)
            if shape is None or shape not in self._missing:  # another thread was faster
                return None
            self._missing.remove(shape)
            return shape

    def _prepare(self) -> None:
        if not (self.aim.reproducible or self.aim.depths):
            return
        try:
            self._probe = Probe(self.programs, self.aim.canonical, self._shapes, serving=True)
        except Exception as error:  # noqa: BLE001 - the engine serves with what it has
            self.done = True
            warn(f"no other shapes serve: they cannot be compared: {first_line(error)}")

    def _add(self, shape: Shape) -> None:
        try:
            self.programs.add(shape)
            self._here.append(shape)
        except Exception as error:  # noqa: BLE001 - the engine serves without it
            self._fail(shape, error)
        with self._lock:
            self._compiling -= 1
        if not self.is_compiling:
            jaxcache.seal()

    def _fail(self, shape: Shape, error: Exception) -> None:
        self.failed[shape] = str(error)
        warn(f"{shape} does not serve: {first_line(error)}")

    @property
    def missing(self) -> Sequence[Shape]:
        """Shapes that are compiled only if steps want them."""
        return () if self._waited_for else tuple(self._missing)

    @property
    def is_compiling(self) -> bool:
        return self._compiling > len(self._missing)

    @property
    def has_in_hand(self) -> bool:
        """True if a shape is being compiled, or waits to be compared."""
        return self.is_compiling or bool(self._here) or self._runs is not None

    # ------------------------------------------------------------ comparing, between steps

    @property
    def busy(self) -> bool:
        """True if there is something to run, or the warm-up can end."""
        return self._runs is not None or self.done or (self._is_ready and (bool(self._here) or self._is_last))

    @property
    def _is_ready(self) -> bool:
        return self._probe is not None or not (self.aim.reproducible or self.aim.depths)

    @property
    def _is_last(self) -> bool:
        # in this order: a thread that compiles adds to the one before it takes from the other
        return not self._compiling and not self._here

    def advance(self, state: StepArguments, tables: PageTables, spare: int) -> KVCache | None:
        """Do one run of a comparison, in pages that are lent once that leaves `spare` to running sequences;
        returns the cache, None if a failure has cost it."""
        if self._runs is None and not self.done:
            self._choose(tables, spare)
        if self._runs is None or self._probe is None:
            return state.cache
        self._probe.take(state.params, state.cache)
        try:
            next(self._runs)
        except StopIteration:
            self._finish(tables)
        except Exception as error:  # noqa: BLE001 - the engine serves without what fails
            return self._failed(error)
        return self._probe.give()

    def _failed(self, error: Exception) -> None:
        if self._current is not None:
            self._fail(self._current, error)
        else:
            self.done = True
            warn(f"steps are not compared as a whole: {first_line(error)}")
        self._current = None

    def interrupt(self, tables: PageTables) -> None:
        """Release pages and memory; the comparison under way begins again later."""
        if self._current is not None:
            self._here.appendleft(self._current)
        if self._probe is not None:
            self._probe.rest()
        self._finish(tables)

    def replaced(self, tables: PageTables) -> None:
        """Compare later shapes on other parameters, which are served from now on."""
        self.interrupt(tables)
        self._record = None
        if self._probe is not None:
            self._probe.forget()

    def _finish(self, tables: PageTables) -> None:
        if self._lent:
            tables.take_back(self._lent)
        self._lent, self._runs, self._current = [], None, None

    def _choose(self, tables: PageTables, spare: int) -> None:
        """Choose what to run next, if there are pages for it."""
        if not self.aim.reproducible:
            while self._here:
                self.classes = self.classes.joined(self._here.popleft())
        last = self._is_last
        if self._probe is None:
            if last and self._is_ready:
                self._conclude(None)
        elif self._here or last:
            self._lent = tables.lend(self._probe.needed, spare) or []
            if self._lent:
                self._probe.lent = self._lent
                self._runs = self._end(self._probe) if last else self._join(self._probe)

    def _join(self, probe: Probe) -> Runs[None]:
        self._current = shape = self._here.popleft()
        if (yield from probe.agrees(shape)):
            self.classes = self.classes.joined(shape)

    def _end(self, probe: Probe) -> Runs[None]:
        """Find what concerns all shapes together, and keep the classes for the next start."""
        if self.aim.reproducible:
            self.classes = replace(self.classes, same_bits=(yield from probe.same_bits()))
            if not self.failed:
                executable_cache.write(self._record, self.classes)
        wanted = self.aim.depths and self.classes.verify
        self._conclude((yield from timed(probe, self.classes, self.aim.depths)) if wanted else None)

    def _conclude(self, seconds: dict[tuple[int, int], float] | None) -> None:
        self.speculation, self.done = self.speculate(self.classes, seconds), True

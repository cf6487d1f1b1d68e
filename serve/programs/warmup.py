"""The rest of a cold engine's table: compiled while the engine serves with its first programs, compared with
them between its steps, and taken into its classes one by one.

The first programs are the canonical ones, whose bits all others must have, so whatever joins later changes no
result. Compiling needs no engine and has threads of its own; comparing needs pages of the cache, which are
lent for as long as one shape takes.
"""

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

import jax

from ...kvcache.pages import KVCache
from ...kvcache.tables import PageTables, Tables
from ...model.pair import Params
from ..host.store import warn
from . import jaxcache, kept
from .classes import Classes, record, timed
from .compile import Arguments, Programs
from .probe import Probe, Runs
from .shapes import PHASES, Canonical, Shape

THREADS = "duetto-warmup"  # how the names of the threads that compile begin
NICENESS = 10  # of the threads that compile: serving goes first
PAUSE = 0.02  # seconds between two looks at an engine


class Aim(NamedTuple):
    """What a warm-up is to find: shapes with the bits of the canonical ones, where there is a contract, and
    the times of steps with up to `guesses` guesses."""

    canonical: Canonical
    reproducible: bool
    guesses: int


def first_shapes(shapes: Iterable[Shape], canonical: Canonical) -> tuple[Shape, Shape]:
    """The smallest set that serves every request: a prefill and a decode, the canonical ones where the table
    has them."""
    prefills = [s for s in shapes if s.phase == "prefill" and s.rows == 1]
    decodes = [s for s in shapes if s.phase == "decode" and s.tokens == 1]
    return (
        canonical.prefill if canonical.prefill in prefills else min(prefills),
        canonical.decode if canonical.decode in decodes else max(decodes),
    )


def in_turn(shapes: Iterable[Shape]) -> list[Shape]:
    """The order to compile in: of each phase the largest first, since those save most calls."""
    phases = [sorted((s for s in shapes if s.phase == p), key=lambda s: -s.area) for p in reversed(PHASES)]
    return [shape for each in zip_longest(*phases) for shape in each if shape is not None]


class Warmup:
    """What an engine with `classes` has still to compile and to compare.

    `advance` is called between its steps. `classes` grow; once `done`, `seconds` has the times of steps as
    `timed` has them, if they were wanted. A shape that fails is left out, and noted in `failed`.
    """

    def __init__(self, programs: Programs, params: Params, classes: Classes, aim: Aim):
        self.programs, self.classes, self.aim = programs, classes, aim
        self.seconds: dict[tuple[int, int], float] | None = None
        self.failed: dict[Shape, str] = {}
        self.done = self.stopped = False
        self._record = record(programs, params, aim.canonical) if aim.reproducible else None
        self._missing = deque(in_turn(programs.missing))
        self._compiling = len(self._missing)
        self._here = deque(s for s in programs.steps if s not in classes.shapes)
        self._lock = threading.Lock()
        self._probe: Probe | None = None
        self._runs: Runs[None] | None = None
        self._current: Shape | None = None  # that is compared
        self._lent: Tables = []

    # ------------------------------------------------------------ compiling, in threads

    def begin(self, idle: Callable[[], bool]) -> None:
        """Start to compile. `idle` is called now and then from these threads until all is done: an engine
        with nothing else to do may advance there. False of it says that nobody wants the engine any more."""
        threads = max(1, min((kept.cores() or 2) // 2, self._compiling))
        targets = [partial(self._attend, idle), *[partial(self._work, idle)] * (threads - 1)]
        for number, target in enumerate(targets):
            threading.Thread(target=target, name=f"{THREADS}-{number}").start()

    def stop(self) -> None:
        """Compile nothing more than what is begun."""
        self.stopped = True

    @property
    def _wanted(self) -> bool:
        return not (self.stopped or self.done) and threading.main_thread().is_alive()

    def _attend(self, idle: Callable[[], bool]) -> None:
        if self.aim.reproducible or self.aim.guesses:
            shapes = [*self.programs.steps, *self.programs.missing]
            self._probe = Probe(self.programs, self.aim.canonical, shapes)
        self._work(idle)
        while self._wanted and idle():
            time.sleep(PAUSE)

    def _work(self, idle: Callable[[], bool]) -> None:
        lower_priority()
        while self._missing and self._wanted and idle():
            with suppress(IndexError):  # another thread has taken the last
                self._add(self._missing.popleft())

    def _add(self, shape: Shape) -> None:
        try:
            self.programs.add(shape)
            self._here.append(shape)
        except Exception as error:  # noqa: BLE001 - the engine serves without it
            self._fail(shape, error)
        with self._lock:
            self._compiling -= 1
        if not self._compiling:
            jaxcache.seal()

    def _fail(self, shape: Shape, error: Exception) -> None:
        self.failed[shape] = str(error)
        warn(f"{shape} does not serve: {type(error).__name__}: {str(error).partition(chr(10))[0]}")

    # ------------------------------------------------------------ comparing, between steps

    @property
    def busy(self) -> bool:
        """Whether there is something to run."""
        return self._runs is not None or bool(self._here) or (not self._compiling and not self.done)

    def advance(self, state: Arguments, tables: PageTables, spare: int) -> KVCache:
        """One run of what is compared, in pages that are lent once that leaves `spare` to the sequences that
        run; gives the cache back.

        Raises what the device raises, and the cache is lost.
        """
        if self._runs is None:
            self._choose(tables, spare)
        if self._runs is None or self._probe is None:
            return state.cache
        self._probe.take(state.params, state.cache)
        try:
            next(self._runs)
        except StopIteration:
            self._finish(tables)
        except jax.errors.JaxRuntimeError as error:
            if self._current is not None:
                self._fail(self._current, error)
            self._current = None
            raise
        return self._probe.give()

    def interrupt(self, tables: PageTables) -> None:
        """Give pages and memory back: what was being compared begins again later."""
        if self._current is not None:
            self._here.appendleft(self._current)
        if self._probe is not None:
            self._probe.rest()
        self._finish(tables)

    def replaced(self, tables: PageTables) -> None:
        """Other parameters are served from now on: shapes that come are compared on them."""
        self.interrupt(tables)
        self._record = None
        if self._probe is not None:
            self._probe.forget()

    def _finish(self, tables: PageTables) -> None:
        if self._lent:
            tables.take_back(self._lent)
        self._lent, self._runs, self._current = [], None, None

    def _choose(self, tables: PageTables, spare: int) -> None:
        """What to run next, if there are pages for it."""
        if not self.aim.reproducible:
            while self._here:
                self.classes = self.classes.joined(self._here.popleft())
        last = not self._here and not self._compiling
        if self._probe is None:
            self.done = last and not self.aim.reproducible and not self.aim.guesses
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
        """What is to be known of all shapes together; then they are kept for the next start."""
        if self.aim.reproducible:
            self.classes = replace(self.classes, same_bits=(yield from probe.same_bits()))
            if not self.failed:
                kept.write(self._record, self.classes)
        if self.aim.guesses and self.classes.verify:
            self.seconds = yield from timed(probe, self.classes, self.aim.guesses)
        self.done = True


def lower_priority() -> None:
    """Let the threads that serve go before this one, and before those that XLA starts from it."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)

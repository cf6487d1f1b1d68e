"""Warm-up while the engine serves. Threads compile the rest of a cold engine's shapes. Between the engine's
steps each is compared with the first programs, and added to the classes.

The first programs are canonical: a shape that joins later must have their bits, so it changes no result. A
comparison needs pages of the cache, which are lent for one shape at a time.
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
from ....kvcache.tables import PageTables, SequenceTables
from ...host.streams import error_headline, warn_once
from ..compiled import executable_cache, jaxcache
from ..compiled.local_executor import LocalExecutor
from ..compiled.lowering import StepArguments
from ..compiled.program_table import WARMUP_THREAD_PREFIX
from ..compiled.shapes import PHASES, CanonicalShapes, Shape
from .classes import ShapeClasses, time_steps
from .probe import Probe, Runs

OPTIONAL_PHASES = "prefill", "decode"  # phases that an engine can serve with some of their shapes
WARMUP_POLL_SECONDS = 0.02  # seconds between two polls of an engine
YIELD_SECONDS = 0.001  # seconds after a run that a waiting caller has to take the engine


# Makes the speculation from the classes and the times of their steps, as `time_steps` returns them.
SpeculationFactory = Callable[[ShapeClasses, dict[tuple[int, int], float] | None], Any]


class WarmupGoal(NamedTuple):
    """Goal of a warm-up.

    canonical: shapes whose bits the others are compared with.
    reproducible: True if only shapes with these bits may serve.
    depths: numbers of draft tokens of a row whose steps are timed; empty if none are.
    """

    canonical: CanonicalShapes
    reproducible: bool
    depths: tuple[int, ...]


def first_shapes(shapes: Iterable[Shape], canonical: CanonicalShapes) -> tuple[Shape, Shape]:
    """Return a prefill and a decode that can serve every request: the canonical ones, if the table has
    them."""
    prefills = [s for s in shapes if s.phase == "prefill" and s.rows == 1]
    decodes = [s for s in shapes if s.phase == "decode" and s.tokens == 1]
    return (
        canonical.prefill_shape if canonical.prefill_shape in prefills else min(prefills),
        canonical.decode_shape if canonical.decode_shape in decodes else max(decodes),
    )


def compile_order(shapes: Collection[Shape]) -> list[Shape]:
    """Return the shapes in the order of compilation: phases alternate, and each phase's largest shape is
    first, since it saves most steps."""
    shapes_by_phase = [
        sorted((s for s in shapes if s.phase == p), key=lambda s: -s.area) for p in reversed(PHASES)
    ]
    return [
        shape for alternates in zip_longest(*shapes_by_phase) for shape in alternates if shape is not None
    ]


class Warmup:
    """Compilation and comparison of the shapes that an engine lacks.

    Each shape is in one of these states:

    | state | moved on by |
    |---|---|
    | missing | a thread that compiles it, if it is `wanted`, or if the engine `is_idle` or waits |
    | compiled | the engine, which calls `advance` between its steps and compares it, run by run |
    | in `classes` | nothing: it serves |
    | in `failed` | nothing: it could not be compiled or compared, and does not serve |

    Shapes of verification are compiled at once, because the engine waits for all of them. When no shape is
    left, the classes are stored under `classes_key`, and the warm-up is `is_done`.

    classes: shapes that serve; they grow.
    speculation: made by `make_speculation` at the end, from the classes and the times of steps.
    failed: errors of shapes that could not be compiled or compared.
    wanted: shape that the engine's steps need next; set by the engine.
    is_idle: True if the engine has nothing to serve; set by the engine.
    """

    def __init__(
        self,
        executor: LocalExecutor,
        shapes: Collection[Shape],
        classes: ShapeClasses,
        goal: WarmupGoal,
        make_speculation: SpeculationFactory,
        classes_key: str | None = None,
    ):
        self.programs, self._executor = executor.programs, executor
        self.classes, self.goal, self.make_speculation = classes, goal, make_speculation
        self.speculation: Any = None
        self.failed: dict[Shape, str] = {}
        self.is_done = self.is_stopped = False
        self._classes_key, self._shapes = classes_key, {*self.programs.steps, *shapes}
        self._missing = compile_order([s for s in shapes if s not in self.programs.steps])
        self._blocks_engine = any(s.phase not in OPTIONAL_PHASES for s in shapes)
        self.wanted: Shape | None = None
        self.is_idle, self._has_made_probe = False, False
        self._num_uncompiled = len(self._missing)
        self._uncompared = deque(s for s in shapes if s in self.programs.steps and s not in classes.shapes)
        self._lock = threading.Lock()
        self._probe: Probe | None = None
        self._runs: Runs[None] | None = None
        self._current_shape: Shape | None = None  # that is compared
        self._lent_pages: SequenceTables = []

    # ------------------------------------------------------------ compiling, in threads

    def start_threads(self, advance_if_idle: Callable[[], bool]) -> None:
        """Start threads that compile. One of them also calls `advance_if_idle` until the warm-up is done: it
        advances an engine that has nothing to serve, and returns True if it did."""
        threads = max(1, min((executable_cache.num_cores() or 2) // 2, self._num_uncompiled))
        targets = [
            partial(self._advance_or_compile, advance_if_idle),
            *[self._compile_missing] * (threads - 1),
        ]
        for number, target in enumerate(targets):
            threading.Thread(target=target, name=f"{WARMUP_THREAD_PREFIX}-{number}").start()

    def stop(self) -> None:
        """Start no more compilations, and release the arrays on the device."""
        self.is_stopped = True
        if self._probe is not None:
            self._probe.release_arrays()

    @property
    def _is_running(self) -> bool:
        """True while the threads have to run."""
        return not (self.is_stopped or self.is_done) and threading.main_thread().is_alive()

    def _advance_or_compile(self, advance_if_idle: Callable[[], bool]) -> None:
        """Advance an idle engine, and compile shapes otherwise, until the warm-up is done."""
        while self._is_running:
            if advance_if_idle():
                time.sleep(YIELD_SECONDS)
                continue
            shape = self._take_next_shape()
            if not self._has_made_probe and (shape or self._uncompared or not self._num_uncompiled):
                self._has_made_probe = True
                self._make_probe()
            self._compile_shape(shape) if shape else time.sleep(WARMUP_POLL_SECONDS)
        if self.is_done:
            advance_if_idle()  # an engine without requests takes the result

    def _compile_missing(self) -> None:
        """Compile shapes until none is missing."""
        while self._is_running and self._missing:
            shape = self._take_next_shape()
            self._compile_shape(shape) if shape else time.sleep(WARMUP_POLL_SECONDS)

    def _take_next_shape(self) -> Shape | None:
        """Take the shape to compile now: the wanted one, or the first missing one if the engine is idle or
        waits. Returns None if there is nothing to compile now."""
        with self._lock:
            shape, self.wanted = self.wanted, None
            if self.is_idle or self._blocks_engine:
                shape = next(iter(self._missing), None)
            if shape is None or shape not in self._missing:  # another thread has taken it
                return None
            self._missing.remove(shape)
            return shape

    def _make_probe(self) -> None:
        """Make the probe, if shapes are compared or timed. If that fails, the warm-up is done."""
        if not (self.goal.reproducible or self.goal.depths):
            return
        try:
            self._probe = Probe(self._executor, self.goal.canonical, self._shapes, is_serving=True)
        except Exception as error:  # noqa: BLE001 - the engine serves with its first shapes
            self.is_done = True
            warn_once(f"no other shapes serve: they cannot be compared: {error_headline(error)}")

    def _compile_shape(self, shape: Shape) -> None:
        """Compile a shape, which is compared next."""
        try:
            self.programs.add(shape)
            self._uncompared.append(shape)
        except Exception as error:  # noqa: BLE001 - the engine serves without it
            self._record_failure(shape, error)
        with self._lock:
            self._num_uncompiled -= 1
        if not self.is_compiling:
            jaxcache.store_checksums()

    def _record_failure(self, shape: Shape, error: Exception) -> None:
        """Record a shape's error, with a warning."""
        self.failed[shape] = str(error)
        warn_once(f"{shape} does not serve: {error_headline(error)}")

    @property
    def missing(self) -> Sequence[Shape]:
        """Shapes that are compiled only if the engine wants them."""
        return () if self._blocks_engine else tuple(self._missing)

    @property
    def is_compiling(self) -> bool:
        """True while a shape is being compiled."""
        return self._num_uncompiled > len(self._missing)

    @property
    def has_pending(self) -> bool:
        """True if a shape is being compiled, or waits to be compared."""
        return self.is_compiling or bool(self._uncompared) or self._runs is not None

    # ------------------------------------------------------------ comparing, between steps

    @property
    def has_work(self) -> bool:
        """True if `advance` has something to do."""
        return (
            self._runs is not None
            or self.is_done
            or (self._is_ready and (bool(self._uncompared) or self._has_compared_all))
        )

    @property
    def _is_ready(self) -> bool:
        """True if the probe is made, or none is needed."""
        return self._probe is not None or not (self.goal.reproducible or self.goal.depths)

    @property
    def _has_compared_all(self) -> bool:
        """True if no shape is left to be compiled or compared."""
        # in this order: a compiling thread adds to `_uncompared` before it subtracts from `_num_uncompiled`
        return not self._num_uncompiled and not self._uncompared

    def advance(self, arguments: StepArguments, tables: PageTables, spare: int) -> KVCache | None:
        """Do one run of a comparison. Returns the cache, or None if a failure has consumed it.

        The run's pages are lent if `spare` pages of each window remain for running sequences.
        """
        if self._runs is None and not self.is_done:
            self._start_next_runs(tables, spare)
        if self._runs is None or self._probe is None:
            return arguments.cache
        self._probe.take_cache(arguments.params, arguments.cache)
        try:
            next(self._runs)
        except StopIteration:
            self._return_pages(tables)
        except Exception as error:  # noqa: BLE001 - the engine serves without the shape
            return self._on_run_failed(error)
        return self._probe.return_cache()

    def _on_run_failed(self, error: Exception) -> None:
        """Leave out the shape whose comparison failed; end the warm-up if all shapes together were
        compared."""
        if self._current_shape is not None:
            self._record_failure(self._current_shape, error)
        else:
            self.is_done = True
            warn_once(f"steps are not compared as a whole: {error_headline(error)}")
        self._current_shape = None

    def interrupt(self, tables: PageTables) -> None:
        """Release pages and memory. The comparison that is under way begins again later."""
        if self._current_shape is not None:
            self._uncompared.appendleft(self._current_shape)
        if self._probe is not None:
            self._probe.release_arrays()
        self._return_pages(tables)

    def on_weights_replaced(self, tables: PageTables) -> None:
        """Compare shapes on other parameters from now on, because the engine serves these."""
        self.interrupt(tables)
        self._classes_key = None
        if self._probe is not None:
            self._probe.clear_results()

    def _return_pages(self, tables: PageTables) -> None:
        """Return the lent pages, and forget the runs."""
        if self._lent_pages:
            tables.return_warmup_pages(self._lent_pages)
        self._lent_pages, self._runs, self._current_shape = [], None, None

    def _start_next_runs(self, tables: PageTables, spare: int) -> None:
        """Choose the next runs, if there are pages for them."""
        if not self.goal.reproducible:
            while self._uncompared:
                self.classes = self.classes.with_shape(self._uncompared.popleft())
        is_last = self._has_compared_all
        if self._probe is None:
            if is_last and self._is_ready:
                self._complete_warmup(None)
        elif self._uncompared or is_last:
            self._lent_pages = tables.lend_warmup_pages(self._probe.needed_pages, spare) or []
            if self._lent_pages:
                self._probe.lent_pages = self._lent_pages
                self._runs = (
                    self._finish_comparison(self._probe) if is_last else self._compare_shape(self._probe)
                )

    def _compare_shape(self, probe: Probe) -> Runs[None]:
        """Compare the next shape, and add it to the classes if it agrees."""
        self._current_shape = shape = self._uncompared.popleft()
        if (yield from probe.matches_canonical(shape)):
            self.classes = self.classes.with_shape(shape)

    def _finish_comparison(self, probe: Probe) -> Runs[None]:
        """Compare prefill with decode, store the classes for later starts, time the steps, and end the
        warm-up."""
        if self.goal.reproducible:
            self.classes = replace(self.classes, same_bits=(yield from probe.prefill_matches_decode()))
            if not self.failed:
                executable_cache.write_record(self._classes_key, self.classes)
        wanted = self.goal.depths and self.classes.verify
        self._complete_warmup(
            (yield from time_steps(probe, self.classes, self.goal.depths)) if wanted else None
        )

    def _complete_warmup(self, seconds: dict[tuple[int, int], float] | None) -> None:
        """Make the speculation, and mark the warm-up as done."""
        self.speculation, self.is_done = self.make_speculation(self.classes, seconds), True

"""Warm-up while the engine serves. Threads compile the rest of a cold engine's shapes. Between the engine's
steps each is compared with the first programs, and added to the classes.

The first programs are canonical: a shape that joins later must have their bits, so it changes no result. A
comparison is made between two steps as a whole, in free pages of the cache.
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
from ....kvcache.tables import PageTables
from ...host.devices import num_cores
from ...host.streams import error_headline, warn_once
from ..compiled import executable_cache, jaxcache
from ..compiled.local_executor import LocalExecutor
from ..compiled.lowering import StepArguments
from ..compiled.program_table import WARMUP_THREAD_PREFIX
from ..compiled.shapes import PHASES, CanonicalShapes, Shape
from .classes import ShapeClasses, timed_shapes
from .probe import Probe

OPTIONAL_PHASES = "prefill", "decode"  # phases that an engine can serve with some of their shapes
WARMUP_POLL_SECONDS = 0.02  # seconds between two polls of an engine
YIELD_SECONDS = 0.001  # seconds after a comparison that a waiting caller has to take the engine


# Makes the speculation from the classes and the times of their steps, by the keys of `timed_shapes`.
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
    | compiled | the engine, which calls `advance` between its steps and compares it |
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
        self.is_idle = False
        self._num_uncompiled = len(self._missing)
        self._uncompared = deque(s for s in shapes if s in self.programs.steps and s not in classes.shapes)
        self._lock = threading.Lock()
        self._probe: Probe | None = None
        self._lacks_probe = goal.reproducible or bool(goal.depths)  # shapes are compared or timed
        self._has_compared_phases = not goal.reproducible
        self._step_seconds: dict[tuple[int, int], float] = {}

    # ------------------------------------------------------------ compiling, in threads

    def start_threads(self, advance_if_idle: Callable[[], bool]) -> None:
        """Start threads that compile. One of them also calls `advance_if_idle` until the warm-up is done: it
        advances an engine that has nothing to serve, and returns True if it did."""
        threads = max(1, min((num_cores() or 2) // 2, self._num_uncompiled))
        targets = [
            partial(self._advance_or_compile, advance_if_idle),
            *[self._compile_missing] * (threads - 1),
        ]
        for number, target in enumerate(targets):
            threading.Thread(target=target, name=f"{WARMUP_THREAD_PREFIX}-{number}").start()

    def stop(self) -> None:
        """Start no more compilations."""
        self.is_stopped = True

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
            if self._lacks_probe and (shape or self._uncompared or not self._num_uncompiled):
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
        """Make the probe. If that fails, the warm-up is done."""
        try:
            self._probe = Probe(self._executor, self.goal.canonical, self._shapes)
            self._lacks_probe = False
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
        return self.is_compiling or bool(self._uncompared)

    # ------------------------------------------------------------ comparing, between steps

    @property
    def has_work(self) -> bool:
        """True if `advance` has something to do."""
        has_shapes = bool(self._uncompared) or self._has_compared_all
        return self.is_done or (has_shapes and not self._lacks_probe)

    @property
    def _has_compared_all(self) -> bool:
        """True if no shape is left to be compiled or compared."""
        # in this order: a compiling thread adds to `_uncompared` before it subtracts from `_num_uncompiled`
        return not self._num_uncompiled and not self._uncompared

    @property
    def needed_pages(self) -> int:
        """Number of pages of every group that `advance` overwrites."""
        return 0 if self._probe is None or self.is_done else self._probe.needed_pages

    def advance(self, arguments: StepArguments, tables: PageTables) -> KVCache | None:
        """Compare a shape, or do the next of what follows the comparisons, in `needed_pages` free pages. No
        step is in flight. Returns the cache, or None if a failure has consumed it."""
        if not self.goal.reproducible:
            while self._uncompared:
                self.classes = self.classes.with_shape(self._uncompared.popleft())
        is_last = self._has_compared_all
        if self.is_done or not (is_last or self.goal.reproducible):
            return arguments.cache
        if self._probe is None:
            self._complete_warmup(None)
            return arguments.cache
        work = self._finish_comparison if is_last else self._compare_shape
        try:
            with tables.borrow_pages(self.needed_pages) as pages:
                return self._probe.run(arguments, pages, work)[1].cache
        except Exception as error:  # noqa: BLE001 - the engine serves without the shape
            self._on_comparison_failed(error)
            return None

    def _compare_shape(self, probe: Probe) -> None:
        """Compare the next shape, and add it to the classes if it agrees."""
        is_equal = probe.matches_canonical(self._uncompared[0])
        shape = self._uncompared.popleft()  # not before: an interrupted comparison is made again
        if is_equal:
            self.classes = self.classes.with_shape(shape)

    def _finish_comparison(self, probe: Probe) -> None:
        """Compare prefill with decode and store the classes for later starts, then time one step in each
        call, and end the warm-up."""
        if not self._has_compared_phases:
            self.classes = replace(self.classes, same_bits=probe.does_prefill_match_decode())
            self._has_compared_phases = True
            if not self.failed:
                executable_cache.write_record(self._classes_key, self.classes)
        wanted = self.goal.depths and self.classes.verify
        shapes = timed_shapes(self.classes, self.goal.depths) if wanted else {}
        for size, k in [key for key in shapes if key not in self._step_seconds][:1]:
            self._step_seconds[size, k] = probe.time_step(shapes[size, k], k + 1)
        if len(self._step_seconds) == len(shapes):
            self._complete_warmup(self._step_seconds or None)

    def _complete_warmup(self, seconds: dict[tuple[int, int], float] | None) -> None:
        """Make the speculation, and mark the warm-up as done."""
        self.speculation, self.is_done = self.make_speculation(self.classes, seconds), True

    def _on_comparison_failed(self, error: Exception) -> None:
        """Leave out the shape whose comparison failed; end the warm-up if all shapes together were
        compared."""
        if self._uncompared:
            self._record_failure(self._uncompared.popleft(), error)
        else:
            self.is_done = True
            warn_once(f"steps are not compared as a whole: {error_headline(error)}")

    def on_weights_replaced(self) -> None:
        """Compare shapes on other parameters from now on, because the engine serves these."""
        self._classes_key, self._step_seconds = None, {}
        if self._probe is not None:
            self._probe.clear_results()

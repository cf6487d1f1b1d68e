"""The closed table of shapes: programs are compiled ahead of time, and only compiled ones are called."""

import threading
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import jax

from ....model.gpus import disable_kernels
from ...host import progress
from ...host.devices import num_cores
from ...host.streams import error_headline, warn_once
from . import executable_cache
from .encoder_input import EncoderKey
from .executable_cache import Lowered
from .futures import SplitStep
from .lowering import ProgramKey, ProgramLowering, PromptKey, is_shape, xla_options
from .shapes import Shape
from .small_programs import SmallPrograms
from .tuning import tuning_hash

WARMUP_THREAD_PREFIX = (
    "duetto-warmup"  # prefix of the names of a warm-up's threads; their compilations are not counted
)


def compiling_message(num_programs: int, num_later: int = 0) -> str:
    """Return the message that `num_programs` programs are compiled now, and `num_later` ones while the engine
    serves."""
    programs = "1 program" if num_programs == 1 else f"{num_programs} programs"
    storage_note = ", kept for the next start" if jax.config.values["jax_compilation_cache_dir"] else ""
    return f"compiling {programs}{storage_note}" + (
        f"; {num_later} more while they serve" if num_later else ""
    )


class ProgramTable:
    """Compiled steps by shape, and the small programs.

    Programs in `first`, by default all, are compiled by the constructor. With `reproducible`, steps are
    compiled so that bits do not depend on the number of rows.

    lowering: lowers the programs.
    abstract_arguments: a step's arguments as shapes.
    steps: compiled steps, by shape. Steps of equally many rows share the program that samples.
    small_programs: the compiled small programs.
    refused_kernels: names of kernels that no program has.
    key: hash of the programs' keys in the executable cache; None if one cannot be stored.
    are_all_stored: True if all steps were read from disk; `num_read` is their number.
    compile_times: seconds of tracing and compiling.
    seconds: duration of the constructor.
    """

    def __init__(
        self,
        lowering: ProgramLowering,
        programs: Iterable[ProgramKey],
        first: Collection[ProgramKey] | None = None,
        refused_kernels: tuple[str, ...] = (),
        reproducible: bool = False,
    ):
        self.start_time = time.perf_counter()
        self.lowering, self.refused_kernels, self.reproducible = lowering, refused_kernels, reproducible
        self.config, self.sizes = lowering.phases.config, lowering.sizes
        self.abstract_arguments = lowering.abstract_arguments
        self._lowering_lock, self._sampler_lock = threading.Lock(), threading.Lock()
        self._keys = {x: self._program_key(x) for x in self._with_samplers(programs)}
        self.key = executable_cache.combine_keys(self._keys.values())
        self.compile_times = executable_cache.CompileTimes(self.key)
        with ThreadPoolExecutor(max(2, num_cores() or 0), "duetto-compile") as pool:
            self._compiled = self._load_stored(pool)
            self._compiled_at = dict.fromkeys(self._compiled, self.uptime_seconds)
            self.num_read, self.are_all_stored = len(self._compiled), len(self._compiled) == len(self._keys)
            self.small_programs = self._compile_first(pool, first)
        # in the table's order
        self.steps = {s: self._join_step(s) for s in filter(is_shape, self._keys) if s in self._compiled}
        self.seconds = self.uptime_seconds
        self.compile_times.store_mean(total_seconds=self.seconds)

    # ------------------------------------------------------------ what there is

    @property
    def missing(self) -> list[Shape]:
        """Shapes that are not compiled yet; `add` compiles them later, from any thread."""
        return [s for s in filter(is_shape, list(self._keys)) if s not in self.steps]

    @property
    def uptime_seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start_time

    @property
    def ready_seconds(self) -> dict[Shape, float]:
        """Seconds after the start at which each step was ready."""
        return {s: max(self._compiled_at[x] for x in self._with_samplers([s])) for s in list(self.steps)}

    @property
    def num_programs(self) -> int:
        """Number of programs."""
        return len(self._compiled) + len(self.small_programs)

    def report(self) -> dict[str, Any]:
        """Return the numbers of programs, of programs read from disk and of missing ones, the seconds of the
        start and of compiling, and the time at which each step was ready."""
        ready = {str(shape): round(t, 3) for shape, t in sorted(self.ready_seconds.items())}
        return {
            "programs": self.num_programs,
            "programs_read": self.num_read,
            "programs_missing": len(self.missing),
            "warmup_seconds": self.seconds,
            "compile_seconds": sum(self.compile_times.seconds.values()),
            "compiled_at": ready,
        }

    def step_parts(self, shape: Shape) -> list[Any]:
        """Return the compiled programs of a step."""
        return [self._compiled[x] for x in self._with_samplers([shape])]

    def matmul_tuning_hash(self, shapes: Iterable[Shape]) -> str | None:
        """Return a hash of the configuration of an accelerator's matrix products in these shapes; None on a
        CPU, which `identity` describes. The hash is stored with the programs."""
        (device, *_) = self.abstract_arguments.replicated_sharding.device_set
        if device.platform == "cpu":
            return None
        chosen = sorted(shapes)
        key = executable_cache.combine_keys([self._keys[shape] for shape in chosen], "products")
        digest = executable_cache.read_record(key, str) if self.are_all_stored else None
        if digest is None:
            digest = tuning_hash(self._compiled[x] for x in self._with_samplers(chosen))
            executable_cache.write_record(key, digest)
        return digest

    def _with_samplers(self, programs: Iterable[ProgramKey]) -> list[ProgramKey]:
        """Return programs and the samplers of the shapes among them, without repetitions."""
        programs, choose = list(programs), self.lowering.choose_sampler
        samplers = [sampler for s in filter(is_shape, programs) if (sampler := choose(s))]
        return list(dict.fromkeys([*programs, *samplers]))

    def _join_step(self, shape: Shape) -> Any:
        """Return a step whose programs are compiled."""
        sampler = self.lowering.choose_sampler(shape)
        forward = self._compiled[shape]
        return forward if sampler is None else SplitStep(forward, self._compiled[sampler])

    # ------------------------------------------------------------ compiling

    def _load_stored(self, pool: ThreadPoolExecutor) -> dict[ProgramKey, Any]:
        """Return the programs that are stored on disk."""
        replicated = self.abstract_arguments.replicated_sharding
        stored = executable_cache.load_programs(pool, self._keys, replicated, self.lowering.join_parts)
        return {x: program for x, program in stored.items() if program is not None}

    def _compile_first(self, pool: ThreadPoolExecutor, first: Collection[ProgramKey] | None) -> SmallPrograms:
        """Compile the missing programs in `first`, and of steps that are partly stored. Returns the small
        programs, which are compiled meanwhile."""
        missing = [x for x in self._keys if x not in self._compiled]
        wanted = self._with_samplers(
            x for x in self._keys if first is None or x in first or x in self._compiled
        )
        now = [x for x in missing if x in wanted]
        with progress.show_stage(compiling_message(len(now), len(missing) - len(now)), len(now)) as done:
            # lowered in this thread: jax's settings for a block of code (`with`) hold in one thread only
            jobs = [pool.submit(self._compile, x, self._lower(x)) for x in now]
            small_programs = pool.map(self._compile_small, self.lowering.lower_small())
            for job in as_completed(jobs):
                done(job.result())
            return SmallPrograms(*small_programs)

    def add(self, shape: Shape) -> None:
        """Compile a missing shape, or a shape that is not in the table. It is not stored if it is not in the
        table, or if jax's settings have changed since the start."""
        if self._keys.setdefault(shape) != self._program_key(shape):
            self._keys[shape] = None
        self._compile(shape, self._lower(shape))
        if (sampler := self.lowering.choose_sampler(shape)) is not None:
            with self._sampler_lock:
                if sampler not in self._compiled:
                    self._compile(sampler, self._lower(sampler))
        self.steps[shape] = self._join_step(shape)
        self.compile_times.store_mean()

    def load_or_compile(self, program: PromptKey | EncoderKey) -> Any:
        """Return a program that is not of a step. It is read from disk, or compiled, when it is first
        needed."""
        if program not in self._compiled:
            self._keys[program] = key = self._program_key(program)
            (device, *_) = self.abstract_arguments.replicated_sharding.device_set
            stored = executable_cache.load_program(key, device, self.lowering.join_parts)
            if stored is not None:
                self._compiled[program] = stored
            else:  # in a thread whose compilations are not counted: a request asked for this one
                with ThreadPoolExecutor(1, WARMUP_THREAD_PREFIX) as thread:
                    thread.submit(self._compile, program, self._lower(program)).result()
        return self._compiled[program]

    def _program_key(self, program: ProgramKey) -> str | None:
        """Return the key of a program in the executable cache; None if it cannot be stored."""
        name, operands = self.lowering.describe(program)
        return executable_cache.executable_key(
            self.lowering.phases, name, operands, self.refused_kernels, self._xla_options(program)
        )

    def _xla_options(self, program: ProgramKey) -> dict[str, str] | None:
        """Return XLA's options for a step's program; None for XLA's defaults."""
        return xla_options(self.abstract_arguments, program.product_rows if self.reproducible else 0)

    def _lower(self, program: ProgramKey) -> Lowered:
        """Lower a program without the refused kernels, one at a time: tracing holds Python's lock."""
        with self._lowering_lock, self.compile_times.measure(program), disable_kernels(self.refused_kernels):
            return self.lowering.lower(program)

    def _compile(self, program: ProgramKey, lowered: Lowered) -> None:
        """Compile a lowered program."""
        with self.compile_times.measure(program):
            self._compiled[program] = self._compile_lowered(program, lowered)
        self._compiled_at[program] = self.uptime_seconds

    def _compile_small(self, lowered: Lowered) -> Any:
        return lowered.compile(compiler_options=xla_options(self.abstract_arguments))

    def _compile_lowered(self, program: ProgramKey, lowered: Lowered) -> Any:
        """Compile a lowered program; with XLA's usual options and a warning, if its own options fail."""
        options, default_options = self._xla_options(program), xla_options(self.abstract_arguments)
        try:
            return executable_cache.compile_and_store(self._keys.get(program), lowered, options)
        except jax.errors.JaxRuntimeError as error:
            if options == default_options:
                raise
            warn_once(
                f"{program} may have bits of its own: there is none without cuBLAS: {error_headline(error)}"
            )
            return executable_cache.compile_and_store(self._keys.get(program), lowered, default_options)

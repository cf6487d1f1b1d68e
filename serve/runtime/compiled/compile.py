"""The closed table of shapes: programs are compiled ahead of time, and only compiled ones are called."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ....kvcache.pages import Batch
from ....kvcache.shards import map_slot_update
from ....model.draft_pair import EngineParams, target_params
from ....model.gpus import disable_kernels, gpu_from_device
from ....sampling.state import TokenMasks, load_history, load_masks
from ...host import progress
from ...host.process import clear_frames
from ...host.streams import error_headline, warn_once
from ..steps.phases import Phases
from ..steps.step import SlotContents, Slots, assign_slot
from . import executable_cache
from .batches import BatchRow, make_batch, with_packed_indices
from .executable_cache import JoinedPrograms, Lowered
from .futures import PendingSample, SplitStep
from .lowering import (
    Sampler,
    StepArguments,
    abstract_operands,
    choose_sampler,
    fresh_slots,
    is_shape,
    lower_sampler,
    lower_step,
    lower_zeros,
    make_abstract_arguments,
    mesh_of,
    sampler_operands,
)
from .shapes import Shape, Sizes
from .tuning import tuning_hash

WARMUP_THREAD_PREFIX = (
    "duetto-warmup"  # prefix of the names of a warm-up's threads; their compilations are not counted
)
# number of programs besides the steps: slot assignment, history, masks, cache and slots
NUM_SMALL_PROGRAMS = 5
MASK_SLOTS_PER_CALL = 8  # number of slots whose masks one call writes


def abstract_assignment(slots: Slots, sizes: Sizes) -> tuple[Any, ...]:
    """Return the arguments of `Programs.assign_slot` after the slots, as shapes: slot, SlotContents."""
    knobs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), slots.sampling.knobs)
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    return scalar, SlotContents(scalar, scalar, scalar, knobs, scalar)


def abstract_history(slots: Slots, sizes: Sizes) -> tuple[Any, ...]:
    """Return the arguments of `load_history` after the slots, as shapes: slot, tokens, number of the prompt's
    tokens, number of all tokens, bias."""
    scalar, V = jax.ShapeDtypeStruct((), jnp.int32), slots.sampling.bias.shape[1]
    tokens = jax.ShapeDtypeStruct((sizes.max_model_len,), jnp.int32)
    return scalar, tokens, scalar, scalar, jax.ShapeDtypeStruct((V,), jnp.float32)


def abstract_masks(slots: Slots, sizes: Sizes) -> tuple[Any, ...]:
    """Return the arguments of `load_masks` after the slots, as shapes: slots, the first position of each,
    masks."""
    K, rows = MASK_SLOTS_PER_CALL, slots.sampling.token_masks.masks
    row_numbers = jax.ShapeDtypeStruct((K,), jnp.int32)
    return row_numbers, row_numbers, jax.ShapeDtypeStruct((K, *rows.shape[1:]), rows.dtype)


# Programs that change the slots, each with its arguments after the slots.
SLOT_PROGRAMS = {
    "assign_slot": abstract_assignment,
    "load_history": abstract_history,
    "load_masks": abstract_masks,
}


def wrap_mask_loader(load: Callable[..., TokenMasks]) -> Callable[..., Slots]:
    """Wrap a program that loads masks, so that it takes and returns all slots.

    The program itself has few array arguments: it is called often, and each one costs time.
    """

    def load_into_slots(slots: Slots, *masks: Any) -> Slots:
        allowed = load(slots.sampling.token_masks, *masks)
        return replace(slots, sampling=replace(slots.sampling, token_masks=allowed))

    return load_into_slots


def compiling_message(num_programs: int, num_later: int = 0) -> str:
    """Return the message that `num_programs` programs are compiled now, and `num_later` ones while the engine
    serves."""
    programs = "1 program" if num_programs == 1 else f"{num_programs} programs"
    storage_note = ", kept for the next start" if jax.config.values["jax_compilation_cache_dir"] else ""
    return f"compiling {programs}{storage_note}" + (
        f"; {num_later} more while they serve" if num_later else ""
    )


class Programs:
    """Compiled steps by shape, and five small programs. The small programs assign a slot to a request, load
    its history and the masks of grammars, and make the empty cache and slots.

    Shapes of `first`, by default all, are compiled by the constructor. With `reproducible`, steps are
    compiled so that bits do not depend on the number of rows.

    abstract_arguments: a step's arguments as shapes.
    steps: compiled steps, by shape. Steps of equally many rows share the program that samples.
    can_defer_sampling: True if a decode of one step may sample later than its forward pass.
    missing: shapes that are not compiled yet; `add` compiles them later, from any thread.
    refused_kernels: names of kernels that no program has.
    ready_seconds: seconds after the start at which each step was ready.
    are_all_stored: True if all steps were read from disk; `num_read` is their number.
    compile_times: seconds of tracing and compiling.
    seconds: duration of the constructor.
    """

    def __init__(
        self,
        phases: Phases,
        params: EngineParams,
        sizes: Sizes,
        shapes: Iterable[Shape],
        first: Collection[Shape] | None = None,
        refused_kernels: tuple[str, ...] = (),
        reproducible: bool = False,
    ):
        self.refused_kernels, self.reproducible = refused_kernels, reproducible
        self.start_time = time.perf_counter()
        self.config, self.sizes, self._phases = phases.config, sizes, phases
        self.abstract_arguments = abstract = make_abstract_arguments(phases.config, params, sizes)
        self._devices, self._lowering_lock = abstract.replicated_sharding.device_set, threading.Lock()
        self._gpu = gpu_from_device(next(iter(self._devices)))
        self._sampler_lock = threading.Lock()
        self._keys = {x: self._program_key(x) for x in self._with_samplers(shapes)}
        with ThreadPoolExecutor(max(2, executable_cache.num_cores() or 0), "duetto-compile") as pool:
            stored = executable_cache.load_programs(
                pool, self._keys, abstract.replicated_sharding, self._part_joiner
            )
            self._compiled = {x: program for x, program in stored.items() if program is not None}
            missing = [x for x in stored if x not in self._compiled]
            self.key, self.are_all_stored = executable_cache.combine_keys(self._keys.values()), not missing
            self.num_read, self.compile_times = len(self._compiled), executable_cache.CompileTimes(self.key)
            now = self._with_samplers(s for s in stored if first is None or s in first or s in self._compiled)
            now = [x for x in missing if x in now]
            self.ready_seconds = dict.fromkeys(filter(is_shape, self._compiled), self.uptime_seconds)
            with progress.show_stage(compiling_message(len(now), len(missing) - len(now)), len(now)) as done:
                # lowered in this thread: jax's settings for a block of code (`with`) hold in one thread only
                jobs = [pool.submit(self._compile, x, self._lower_without_refused(x)) for x in now]
                small_programs = pool.map(
                    lambda small: small.compile(compiler_options=self._xla_options()), self._lower_small()
                )
                self.assign_slot, self.load_history, self.load_masks, self.fresh_cache, self.fresh_slots = (
                    small_programs
                )
                for job in as_completed(jobs):
                    done(job.result())
        # in the table's order
        self.steps = {s: self._join_step(s) for s in filter(is_shape, stored) if s in self._compiled}
        self.missing = [s for s in filter(is_shape, stored) if s not in self.steps]
        self.seconds = self.uptime_seconds
        self.compile_times.store_mean(total_seconds=self.seconds)

    def _with_samplers(self, programs: Iterable[Shape | Sampler]) -> list[Shape | Sampler]:
        """Return programs and the samplers of the shapes among them, without repetitions."""
        programs = list(programs)
        samplers = [sampler for s in filter(is_shape, programs) if (sampler := self._choose_sampler(s))]
        return list(dict.fromkeys([*programs, *samplers]))

    def _choose_sampler(self, shape: Shape) -> Sampler | None:
        return choose_sampler(self._phases, shape, self.abstract_arguments, self.sizes)

    def _join_step(self, shape: Shape) -> Any:
        """Return a step whose programs are compiled."""
        sampler = self._choose_sampler(shape)
        forward = self._compiled[shape]
        return forward if sampler is None else SplitStep(forward, self._compiled[sampler])

    @property
    def can_defer_sampling(self) -> bool:
        return self._choose_sampler(Shape("decode", 1, 1)) is not None

    @property
    def uptime_seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.start_time

    @property
    def num_programs(self) -> int:
        """Number of programs."""
        return len(self._compiled) + NUM_SMALL_PROGRAMS

    def report(self) -> dict[str, Any]:
        """Return the numbers of programs, of programs read from disk and of missing ones, the seconds of the
        start and of compiling, and the time at which each step was ready."""
        ready = {str(shape): round(t, 3) for shape, t in sorted(self.ready_seconds.items())}
        return {
            "programs": self.num_programs,
            "programs_read": self.num_read,
            "programs_missing": len([*filter(is_shape, self._keys.keys() - self.steps.keys())]),
            "warmup_seconds": self.seconds,
            "compile_seconds": sum(self.compile_times.seconds.values()),
            "compiled_at": ready,
        }

    def start_serving(self, arguments: StepArguments) -> None:
        """Do nothing; subclasses prepare for the first request."""

    def close(self) -> None:
        """Do nothing; subclasses end their threads and processes."""

    def add(self, shape: Shape) -> None:
        """Compile a missing shape, or a shape that is not in the table. It is not stored if it is not in the
        table, or if jax's settings have changed since the start."""
        if self._keys.setdefault(shape) != self._program_key(shape):
            self._keys[shape] = None
        self._compile(shape, self._lower_without_refused(shape))
        if (sampler := self._choose_sampler(shape)) is not None:
            with self._sampler_lock:
                if sampler not in self._compiled:
                    self._compile(sampler, self._lower_without_refused(sampler))
        self.steps[shape], self.ready_seconds[shape] = self._join_step(shape), self.uptime_seconds
        self.compile_times.store_mean()

    def _program_key(self, program: Shape | Sampler) -> str | None:
        """Return the key of a program in the executable cache; None if it cannot be stored."""
        if isinstance(program, Sampler):
            phase, operands = (
                "sample",
                sampler_operands(self._phases, program, self.abstract_arguments, self.sizes),
            )
        else:
            phase = program.phase if self._choose_sampler(program) is None else "forward"
            operands = abstract_operands(program, self.abstract_arguments, self.sizes)
        return executable_cache.executable_key(
            self._phases, phase, operands, self.refused_kernels, self._xla_options(program)
        )

    def _xla_options(self, program: Shape | Sampler | None = None) -> dict[str, str] | None:
        """Return XLA's options for a step's program, or for a small one if `program` is None; None for XLA's
        defaults."""
        product_rows = program.product_rows if program is not None and self.reproducible else 0
        return self._gpu and self._gpu.compiler_options(product_rows)

    @property
    def _part_joiner(self) -> Callable[..., Any]:
        """Function that joins the parts of a stored step to one program."""
        return executable_cache.join_single

    def _lower_without_refused(self, program: Shape | Sampler) -> Lowered:
        """Lower a program without the refused kernels."""
        with disable_kernels(self.refused_kernels):
            return self._lower(program)

    def _lower(self, program: Shape | Sampler) -> Lowered:
        with (
            self._lowering_lock,
            self.compile_times.measure(program),
        ):  # one at a time: tracing holds Python's lock
            if isinstance(program, Sampler):
                return lower_sampler(self._phases, program, self.abstract_arguments, self.sizes)
            return lower_step(self._phases, program, self.abstract_arguments, self.sizes)

    def _compile(self, program: Shape | Sampler, lowered: Lowered) -> None:
        """Compile a lowered program."""
        with self.compile_times.measure(program):
            self._compiled[program] = self._compile_lowered(program, lowered)
        if is_shape(program):
            self.ready_seconds[program] = self.uptime_seconds

    def _compile_lowered(self, program: Shape | Sampler, lowered: Lowered) -> Any:
        """Compile a lowered program; with XLA's usual options and a warning, if its own options fail."""
        options, default_options = self._xla_options(program), self._xla_options()
        try:
            return executable_cache.compile_and_store(self._keys.get(program), lowered, options)
        except jax.errors.JaxRuntimeError as error:
            if options == default_options:
                raise
            warn_once(
                f"{program} may have bits of its own: there is none without cuBLAS: {error_headline(error)}"
            )
            return executable_cache.compile_and_store(self._keys.get(program), lowered, default_options)

    def step_parts(self, shape: Shape) -> list[Any]:
        """Return the compiled programs of a step."""
        return [self._compiled[x] for x in self._with_samplers([shape])]

    def matmul_tuning_hash(self, shapes: Iterable[Shape]) -> str | None:
        """Return a hash of the configuration of an accelerator's matrix products in these shapes; None on a
        CPU, which `provenance` describes. The hash is stored with the programs."""
        (device, *_) = self._devices
        if device.platform == "cpu":
            return None
        chosen = sorted(shapes)
        key = executable_cache.combine_keys([self._keys[shape] for shape in chosen], "products")
        digest = executable_cache.read_record(key, str) if self.are_all_stored else None
        if digest is None:
            digest = tuning_hash(self._compiled[x] for x in self._with_samplers(chosen))
            executable_cache.write_record(key, digest)
        return digest

    def fresh_arguments(self, params: EngineParams, failure: BaseException | None = None) -> StepArguments:
        """Return the parameters with an unused cache and unused slots. They are made after the arrays of a
        step that raised `failure` are released."""
        clear_frames(failure)
        return StepArguments(params, self.fresh_cache(), self.fresh_slots())

    def _lower_small(self) -> list[Lowered]:
        """Lower the small programs, in the order of the attributes that hold them."""
        return [self._lower_slot_assignment(), *self._lower_loads(), self._lower_cache(), self._lower_slots()]

    def _lower_cache(self) -> Lowered:
        return lower_zeros(self.abstract_arguments.cache)

    def _lower_slots(self) -> Lowered:
        dtype = target_params(self.abstract_arguments.params).embed.dtype
        fresh = partial(fresh_slots, self.config, self.sizes, dtype)
        return jax.jit(fresh, out_shardings=self.abstract_arguments.replicated_sharding).lower()

    def _lower_slot_assignment(self) -> Lowered:
        slots = self.abstract_arguments.slots
        return self._jit_slot_program(assign_slot).lower(slots, *abstract_assignment(slots, self.sizes))

    def _jit_slot_program(self, program: Callable[..., Any]) -> Any:
        """Return the jitted form of a function that changes some slots; their arrays are donated."""
        replicated = self.abstract_arguments.replicated_sharding
        if self.sizes.shards > 1:
            program = map_slot_update(program, mesh_of(replicated))
        return jax.jit(program, donate_argnums=0, out_shardings=replicated)

    def _lower_loads(self) -> list[Lowered]:
        """Lower the programs that load a request's history, and the masks of grammars."""
        slots = self.abstract_arguments.slots

        def load_history_into_slots(slots, slot, tokens, prompt_len, total_len, bias):
            sampling = load_history(slots.sampling, slot, tokens, prompt_len, total_len, bias)
            return replace(slots, sampling=sampling)

        history = self._jit_slot_program(load_history_into_slots).lower(
            slots, *abstract_history(slots, self.sizes)
        )
        masks = self._jit_slot_program(load_masks).lower(
            slots.sampling.token_masks, *abstract_masks(slots, self.sizes)
        )
        return [history, JoinedPrograms([masks], wrap_mask_loader)]

    def run(self, shape: Shape, arguments: StepArguments, batch: Batch) -> tuple[Any, Any, Any]:
        """Dispatch a step; returns cache, slots and Output. The given cache and slots are donated."""
        batch = with_packed_indices(batch, shape, self.sizes)
        return self.steps[shape](arguments.params, arguments.cache, arguments.slots, batch)

    def run_forward(self, shape: Shape, arguments: StepArguments, batch: Batch) -> tuple[Any, PendingSample]:
        """Dispatch the forward pass of a step; returns the cache and the pending draw. The given cache is
        donated."""
        return self.steps[shape].run_forward(arguments.params, arguments.cache, arguments.slots, batch)

    def batch(self, shape: Shape, rows: Mapping[int, BatchRow]) -> Batch:
        return make_batch(self.sizes, shape, rows)

"""The closed table of shapes: programs are compiled ahead of time, and only compiled ones are called."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding

from ....kvcache.pages import Batch, empty_cache
from ....kvcache.quantised import choose_cache_format
from ....kvcache.shardings import cache_shardings, with_auto_axes
from ....kvcache.shardings import slot_sharding as seats_of
from ....kvcache.shards import PAGE_SPEC, SLOT_SPEC, map_phase, map_slot_update
from ....kvcache.stages import outer_params
from ....model.draft_pair import EngineParams, PairConfig, target_params
from ....model.gpus import disable_kernels, gpu_from_device
from ....model.weights.cpu.packed import kernel_isa
from ....model.weights.device_forms import device_lanes
from ....sampling.state import TokenMasks, load_history, load_masks
from ...host import progress
from ...host.process import clear_frames
from ...host.streams import error_headline, warn_once
from ..steps.phases import Phases, TargetOnly
from ..steps.step import SampleRows, SlotContents, Slots, assign_slot, empty_slots, num_sample_rows
from . import executable_cache
from .batches import BatchRow, empty_batch, make_batch, with_packed_indices
from .executable_cache import JoinedPrograms, Lowered
from .futures import PendingSample, SplitStep
from .shapes import Shape, Sizes
from .tuning import tuning_hash

WARMUP_THREAD_PREFIX = (
    "duetto-warmup"  # prefix of the names of a warm-up's threads; their compilations are not counted
)
# number of programs besides the steps: slot assignment, history, masks, cache and slots
NUM_SMALL_PROGRAMS = 5
MASK_SLOTS_PER_CALL = 8  # number of slots whose masks one call writes


@dataclass(frozen=True)
class StepArguments:
    """Arguments of every step besides its batch, as arrays or as shapes.

    cache, slots: may be futures.
    """

    params: EngineParams
    cache: Any  # KVCache
    slots: Any  # Slots

    @property
    def replicated_sharding(self) -> Sharding:
        """Sharding of arrays that are replicated on all devices of a shard."""
        return self.slots.last.sharding


def abstract_tree(tree: Any) -> Any:
    """Return the arrays of a tree as ShapeDtypeStructs with their placement."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=with_auto_axes(x.sharding)), tree
    )


def fresh_slots(config: PairConfig, sizes: Sizes, dtype: Any) -> Slots:
    """Return unused slots for a model that computes in `dtype`."""
    hidden = jax.ShapeDtypeStruct((sizes.hidden,), dtype) if sizes.hidden else None
    V, S = config.target.vocab_size, sizes.max_model_len if sizes.processors else 0
    return empty_slots(sizes.num_slots, V, hidden, sizes.n_top, sizes.positions, sizes.processors, S)


def make_abstract_arguments(config: PairConfig, params: EngineParams, sizes: Sizes) -> StepArguments:
    """Return a step's arguments as shapes. The placement of cache and slots follows from the parameters,
    which may be arrays or shapes."""

    def abstract_array(x: Any, sharding: Sharding) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    dtype, slot_sharding = target_params(params).embed.dtype, seats_of(params, sizes.shards)
    pages = tuple(sizes.shards * count for count in sizes.pages)
    (device, *_) = slot_sharding.device_set
    cache_format, isa = choose_cache_format(sizes.kv_cache_dtype, dtype), kernel_isa(params)
    lanes = device_lanes(slot_sharding.device_set, sizes.shards)
    make_cache = partial(empty_cache, config.layers, pages, sizes.page_size, cache_format, device, isa, lanes)
    cache = jax.eval_shape(make_cache)
    slots = jax.eval_shape(lambda: fresh_slots(config, sizes, dtype))
    places = cache_shardings(config.layers, params, sizes.shards)  # one for a pool and its scales
    cache = jax.tree.map(
        lambda where, pool: jax.tree.map(lambda x: abstract_array(x, where), pool), places, cache
    )
    return StepArguments(
        abstract_tree(params), cache, jax.tree.map(lambda x: abstract_array(x, slot_sharding), slots)
    )


def abstract_batch(shape: Shape, sizes: Sizes, sharding: Sharding) -> Batch:
    """Return the batch of a shape as ShapeDtypeStructs, with rows for every shard."""
    batch = with_packed_indices(empty_batch(sizes, shape, 0), shape, sizes)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch)


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


@dataclass(frozen=True)
class Sampler:
    """Key of the program that samples the rows of a step, in a table of programs."""

    rows: int

    @property
    def product_rows(self) -> int:
        return self.rows

    def __str__(self) -> str:
        return f"sample[{self.rows}]"


def is_shape(program: Shape | Sampler) -> TypeGuard[Shape]:
    """Return True for the key of a step, False for that of a sampler."""
    return isinstance(program, Shape)


def choose_sampler(phases: Phases, shape: Shape, arguments: StepArguments, sizes: Sizes) -> Sampler | None:
    """Return the sampler of a shape; None if its step is one program.

    A dispatch of several steps needs each token at once, and so do drafters.
    """
    is_split = shape.phase == "prefill" or splits_decode(arguments) and shape.tokens == 1
    if not isinstance(phases, TargetOnly) or not is_split or shape.phase == "verify":
        return None
    return Sampler(num_sample_rows(shape.rows, shape.tokens, sizes.max_num_seqs))


def splits_decode(arguments: StepArguments) -> bool:
    """Return True if a decode of one step samples in a second program. On a CPU that takes 5 % longer (8 rows
    of the 135M shape)."""
    (device, *_) = arguments.replicated_sharding.device_set
    return device.platform != "cpu"


def lower_programs(
    phases: Phases, shape: Shape, arguments: StepArguments, sizes: Sizes
) -> list[jax.stages.Lowered]:
    """Lower the programs of a step: the step itself, or its forward pass and its sampler."""
    sampler = choose_sampler(phases, shape, arguments, sizes)
    step = lower_step(phases, shape, arguments, sizes)
    return [step] if sampler is None else [step, lower_sampler(phases, sampler, arguments, sizes)]


def lower_step(phases: Phases, shape: Shape, arguments: StepArguments, sizes: Sizes) -> jax.stages.Lowered:
    """Lower a step's program, or its forward pass if a sampler follows. Cache and slots are donated, and keep
    their placement and layout."""
    replicated = arguments.replicated_sharding
    cache_shardings = jax.tree.map(lambda pool: pool.sharding, arguments.cache)
    has_sampler = choose_sampler(phases, shape, arguments, sizes) is not None
    phase = getattr(phases, "forward" if has_sampler else shape.phase)
    out_specs = (PAGE_SPEC, SLOT_SPEC) if has_sampler else (PAGE_SPEC, SLOT_SPEC, SLOT_SPEC)
    if sizes.shards > 1:
        phase = map_phase(phase, arguments.params, mesh_of(replicated), out_specs=out_specs)
    jitted = jax.jit(
        phase,
        donate_argnums=1 if has_sampler else (1, 2),
        out_shardings=(cache_shardings, *[replicated] * (len(out_specs) - 1)),
    )
    return jitted.lower(*abstract_operands(shape, arguments, sizes))


def lower_sampler(
    phases: Phases, sampler: Sampler, arguments: StepArguments, sizes: Sizes
) -> jax.stages.Lowered:
    """Lower a program that samples rows. The slots are donated."""
    assert isinstance(phases, TargetOnly)
    params, slots, rows = sampler_operands(phases, sampler, arguments, sizes)
    sample, replicated = phases.sample, arguments.replicated_sharding
    if sizes.shards > 1:
        specs = SLOT_SPEC, SLOT_SPEC
        sample = map_phase(sample, params, mesh_of(replicated), specs, specs)
    return jax.jit(sample, donate_argnums=1, out_shardings=replicated).lower(params, slots, rows)


def sampler_operands(
    phases: Phases, sampler: Sampler, arguments: StepArguments, sizes: Sizes
) -> tuple[Any, ...]:
    """Return the arguments of a sampler as shapes: the parameters outside of the layers, slots, rows."""
    params, R = outer_params(target_params(arguments.params)), sizes.shards * sampler.rows

    def abstract_rows(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct((R, *shape), dtype, sharding=arguments.replicated_sharding)

    rows = SampleRows(
        hidden=abstract_rows(params.embed.dtype, phases.config.target.hidden_size),
        slot=abstract_rows(jnp.int32),
        position=abstract_rows(jnp.int32),
        wanted=abstract_rows(bool),
    )
    return params, arguments.slots, rows


def mesh_of(sharding: Sharding) -> Mesh:
    """Return the mesh of a sharding, which has one."""
    assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    return sharding.mesh


def abstract_operands(shape: Shape, arguments: StepArguments, sizes: Sizes) -> tuple[Any, ...]:
    """Return the arguments of a step's program as shapes: parameters, cache, slots, batch."""
    batch = abstract_batch(shape, sizes, arguments.replicated_sharding)
    return arguments.params, arguments.cache, arguments.slots, batch


def lower_zeros(abstract: Any) -> jax.stages.Lowered:
    """Lower a program that makes arrays of zeros with these shapes and placements."""

    def zeros() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)

    return jax.jit(zeros, out_shardings=jax.tree.map(lambda x: x.sharding, abstract)).lower()


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
        return isinstance(self._phases, TargetOnly) and splits_decode(self.abstract_arguments)

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
            operands = sampler_operands(self._phases, program, self.abstract_arguments, self.sizes)
        else:
            operands = abstract_operands(program, self.abstract_arguments, self.sizes)
        phase = "sample" if isinstance(program, Sampler) else program.phase
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

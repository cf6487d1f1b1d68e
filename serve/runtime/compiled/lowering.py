"""Lowering of an engine's programs: the steps, their arguments as shapes, and the small programs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeGuard, runtime_checkable

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
from ....model.gpus import gpu_from_device
from ....model.weights.cpu.packed import kernel_isa
from ....model.weights.device_forms import device_lanes
from ....sampling.state import load_history, load_masks
from ..steps.output import SampleRows
from ..steps.phases import Phases, TargetOnly
from ..steps.step import Slots, assign_slot, empty_slots, num_sample_rows
from .batches import empty_batch, with_packed_indices
from .executable_cache import JoinedPrograms, Lowered, join_single
from .shapes import Shape, Sizes
from .small_programs import (
    SmallPrograms,
    abstract_assignment,
    abstract_history,
    abstract_masks,
    wrap_mask_loader,
)


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
    """Return True for the key of a step, False for the key of a sampler."""
    return isinstance(program, Shape)


def is_decode_split(arguments: StepArguments) -> bool:
    """Return True if a decode of one step samples in a second program. On a CPU that takes 5 % longer (8 rows
    of the 135M shape)."""
    (device, *_) = arguments.replicated_sharding.device_set
    return device.platform != "cpu"


def mesh_of(sharding: Sharding) -> Mesh:
    """Return the mesh of a sharding, which has one."""
    assert isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh)
    return sharding.mesh


def lower_zeros(abstract: Any) -> jax.stages.Lowered:
    """Lower a program that makes arrays of zeros with these shapes and placements."""

    def zeros() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), abstract)

    return jax.jit(zeros, out_shardings=jax.tree.map(lambda x: x.sharding, abstract)).lower()


def xla_options(arguments: StepArguments, product_rows: int = 0) -> dict[str, str] | None:
    """Return XLA's options for programs with these arguments; None for XLA's defaults.

    product_rows: number of rows whose sums must not depend on that number; 0 if they may.
    """
    (device, *_) = arguments.replicated_sharding.device_set
    gpu = gpu_from_device(device)
    return gpu and gpu.compiler_options(product_rows)


@runtime_checkable
class ProgramLowering(Protocol):
    """Lowering of a table's programs for the placement of the parameters.

    phases: phases of the model.
    abstract_arguments: a step's arguments as shapes, with their placement.
    sizes: sizes of the engine.
    join_parts: joins the compiled parts of a program that `lower` has lowered.
    """

    @property
    def phases(self) -> Phases: ...
    @property
    def abstract_arguments(self) -> StepArguments: ...
    @property
    def sizes(self) -> Sizes: ...
    @property
    def join_parts(self) -> Callable[..., Any]: ...

    def choose_sampler(self, shape: Shape) -> Sampler | None:
        """Return the sampler of a shape; None if its step is one program."""
        ...

    def operands(self, program: Shape | Sampler) -> tuple[Any, ...]:
        """Return the arguments of a program as shapes."""
        ...

    def lower(self, program: Shape | Sampler) -> Lowered:
        """Lower a step's program, its forward pass if a sampler follows, or a sampler."""
        ...

    def lower_small(self) -> SmallPrograms:
        """Lower the small programs."""
        ...


@dataclass(frozen=True)
class LocalLowering:
    """Lowering of programs for one device or a mesh. It implements `ProgramLowering`."""

    phases: Phases
    abstract_arguments: StepArguments
    sizes: Sizes

    @classmethod
    def from_params(cls, phases: Phases, params: EngineParams, sizes: Sizes) -> "LocalLowering":
        """Return the lowering for the placement of the parameters, which may be arrays or shapes."""
        return cls(phases, make_abstract_arguments(phases.config, params, sizes), sizes)

    @property
    def join_parts(self) -> Callable[..., Any]:
        return join_single

    @property
    def _replicated_sharding(self) -> Sharding:
        return self.abstract_arguments.replicated_sharding

    # ------------------------------------------------------------ a step

    def choose_sampler(self, shape: Shape) -> Sampler | None:
        """Return the sampler of a shape; None if its step is one program.

        A dispatch of several steps needs each token at once, and so do drafters.
        """
        is_single_decode = shape.phase == "decode" and shape.tokens == 1
        is_split = shape.phase == "prefill" or (is_single_decode and is_decode_split(self.abstract_arguments))
        if not isinstance(self.phases, TargetOnly) or not is_split:
            return None
        return Sampler(num_sample_rows(shape.rows, shape.tokens, self.sizes.max_num_seqs))

    def operands(self, program: Shape | Sampler) -> tuple[Any, ...]:
        """Return the arguments of a program as shapes: parameters, cache, slots and batch of a step; the
        parameters outside of the layers, slots and rows of a sampler."""
        arguments = self.abstract_arguments
        if isinstance(program, Sampler):
            params = outer_params(target_params(arguments.params))
            return params, arguments.slots, self._abstract_rows(program, params.embed.dtype)
        batch = abstract_batch(program, self.sizes, self._replicated_sharding)
        return arguments.params, arguments.cache, arguments.slots, batch

    def _abstract_rows(self, sampler: Sampler, dtype: Any) -> SampleRows:
        """Return the rows of a sampler as shapes.

        dtype: of hidden states.
        """
        R = self.sizes.shards * sampler.rows

        def abstract_array(dtype: Any, *shape: int) -> Any:
            return jax.ShapeDtypeStruct((R, *shape), dtype, sharding=self._replicated_sharding)

        return SampleRows(
            hidden=abstract_array(dtype, self.phases.config.target.hidden_size),
            slot=abstract_array(jnp.int32),
            position=abstract_array(jnp.int32),
            wanted=abstract_array(bool),
        )

    def lower(self, program: Shape | Sampler) -> jax.stages.Lowered:
        """Lower a step's program, its forward pass if a sampler follows, or a sampler."""
        return self._lower_sampler(program) if isinstance(program, Sampler) else self._lower_step(program)

    def lower_all(self, shape: Shape) -> list[jax.stages.Lowered]:
        """Lower the programs of a step: the step itself, or its forward pass and its sampler."""
        sampler = self.choose_sampler(shape)
        return [self.lower(shape)] if sampler is None else [self.lower(shape), self.lower(sampler)]

    def _lower_step(self, shape: Shape) -> jax.stages.Lowered:
        """Lower a step's program, or its forward pass if a sampler follows. Cache and slots are donated, and
        keep their placement and layout."""
        arguments, replicated = self.abstract_arguments, self._replicated_sharding
        cache_shardings = jax.tree.map(lambda pool: pool.sharding, arguments.cache)
        has_sampler = self.choose_sampler(shape) is not None
        phase = getattr(self.phases, "forward" if has_sampler else shape.phase)
        out_specs = (PAGE_SPEC, SLOT_SPEC) if has_sampler else (PAGE_SPEC, SLOT_SPEC, SLOT_SPEC)
        if self.sizes.shards > 1:
            phase = map_phase(phase, arguments.params, mesh_of(replicated), out_specs=out_specs)
        jitted = jax.jit(
            phase,
            donate_argnums=1 if has_sampler else (1, 2),
            out_shardings=(cache_shardings, *[replicated] * (len(out_specs) - 1)),
        )
        return jitted.lower(*self.operands(shape))

    def _lower_sampler(self, sampler: Sampler) -> jax.stages.Lowered:
        """Lower a program that samples rows. The slots are donated."""
        assert isinstance(self.phases, TargetOnly)
        sample, replicated, operands = self.phases.sample, self._replicated_sharding, self.operands(sampler)
        if self.sizes.shards > 1:
            specs = SLOT_SPEC, SLOT_SPEC
            sample = map_phase(sample, operands[0], mesh_of(replicated), specs, specs)
        return jax.jit(sample, donate_argnums=1, out_shardings=replicated).lower(*operands)

    # ------------------------------------------------------------ slots and cache

    def lower_small(self) -> SmallPrograms:
        """Lower the small programs."""
        return SmallPrograms(
            self.lower_slot_assignment(),
            self.lower_history_load(),
            self.lower_mask_load(),
            self.lower_cache(),
            self.lower_slots(),
        )

    def lower_cache(self) -> Lowered:
        """Lower the program that makes an unused cache."""
        return lower_zeros(self.abstract_arguments.cache)

    def lower_slots(self) -> Lowered:
        """Lower the program that makes unused slots."""
        dtype = target_params(self.abstract_arguments.params).embed.dtype
        fresh = partial(fresh_slots, self.phases.config, self.sizes, dtype)
        return jax.jit(fresh, out_shardings=self._replicated_sharding).lower()

    def lower_slot_assignment(self) -> Lowered:
        """Lower the program that assigns a slot to a request."""
        slots = self.abstract_arguments.slots
        return self._jit_slot_program(assign_slot).lower(slots, *abstract_assignment(slots, self.sizes))

    def lower_history_load(self) -> Lowered:
        """Lower the program that loads a request's history."""
        slots = self.abstract_arguments.slots

        def load_history_into_slots(slots, slot, tokens, prompt_len, total_len, bias):
            sampling = load_history(slots.sampling, slot, tokens, prompt_len, total_len, bias)
            return replace(slots, sampling=sampling)

        program = self._jit_slot_program(load_history_into_slots)
        return program.lower(slots, *abstract_history(slots, self.sizes))

    def lower_mask_load(self) -> Lowered:
        """Lower the program that loads the masks of grammars."""
        slots = self.abstract_arguments.slots
        masks = self._jit_slot_program(load_masks).lower(
            slots.sampling.token_masks, *abstract_masks(slots, self.sizes)
        )
        return JoinedPrograms([masks], wrap_mask_loader)

    def _jit_slot_program(self, program: Callable[..., Any]) -> Any:
        """Return the jitted form of a function that changes some slots; their arrays are donated."""
        replicated = self._replicated_sharding
        if self.sizes.shards > 1:
            program = map_slot_update(program, mesh_of(replicated))
        return jax.jit(program, donate_argnums=0, out_shardings=replicated)

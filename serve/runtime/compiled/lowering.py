"""Lowering of steps: their arguments as shapes, and the programs that a step consists of."""

from dataclasses import dataclass
from functools import partial
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding

from ....kvcache.pages import Batch, empty_cache
from ....kvcache.quantised import choose_cache_format
from ....kvcache.shardings import cache_shardings, with_auto_axes
from ....kvcache.shardings import slot_sharding as seats_of
from ....kvcache.shards import PAGE_SPEC, SLOT_SPEC, map_phase
from ....kvcache.stages import outer_params
from ....model.draft_pair import EngineParams, PairConfig, target_params
from ....model.weights.cpu.packed import kernel_isa
from ....model.weights.device_forms import device_lanes
from ..steps.output import SampleRows
from ..steps.phases import Phases, TargetOnly
from ..steps.step import Slots, empty_slots, num_sample_rows
from .batches import empty_batch, with_packed_indices
from .shapes import Shape, Sizes


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


def choose_sampler(phases: Phases, shape: Shape, arguments: StepArguments, sizes: Sizes) -> Sampler | None:
    """Return the sampler of a shape; None if its step is one program.

    A dispatch of several steps needs each token at once, and so do drafters.
    """
    is_split = shape.phase == "prefill" or is_decode_split(arguments) and shape.tokens == 1
    if not isinstance(phases, TargetOnly) or not is_split or shape.phase == "verify":
        return None
    return Sampler(num_sample_rows(shape.rows, shape.tokens, sizes.max_num_seqs))


def is_decode_split(arguments: StepArguments) -> bool:
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

"""Lowering of an engine's programs: the steps, their arguments as shapes, and the small programs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeGuard, get_args, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding

from ....kvcache.pages import Batch, empty_cache
from ....kvcache.quantised import choose_cache_format
from ....kvcache.shardings import cache_shardings, with_auto_axes
from ....kvcache.shardings import slot_sharding as seats_of
from ....kvcache.shards import PAGE_SPEC, SLOT_SPEC, map_phase, map_slot_update
from ....model.draft_pair import EngineParams, PairConfig, target_params
from ....model.gpus import gpu_from_device
from ....model.pooling import Pooled, pool_hidden_states
from ....model.transformer import logit_params
from ....model.tree import has_instance
from ....model.weights.cpu.packed import kernel_isa
from ....model.weights.device_forms import device_lanes
from ....model.weights.input_quantised import InputQuantised
from ....sampling.sample import Scores
from ....sampling.state import load_history, load_masks
from ..steps.output import PromptResult, SampleRows
from ..steps.phases import Phases, TargetOnly
from ..steps.scoring import SCORE_TILES, score_prompts
from ..steps.step import Slots, assign_slot, empty_slots, num_sample_rows
from .batch_arrays import empty_batch, with_embedding_pool, with_packed_indices
from .encoder_input import EncoderKey
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
    embeddings: pool of the embeddings that encoders make [R,D]; None without an encoder.
    """

    params: EngineParams
    cache: Any  # KVCache
    slots: Any  # Slots
    embeddings: Any = None

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
    reports = sizes.n_top, sizes.positions, sizes.processors, S, sizes.logprobs_mode
    return empty_slots(sizes.num_slots, V, hidden, *reports)


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
    embeddings = None
    if sizes.embedding_rows:
        shape = sizes.embedding_rows, config.target.hidden_size
        embeddings = jax.ShapeDtypeStruct(shape, dtype, sharding=slot_sharding)
    slots = jax.tree.map(lambda x: abstract_array(x, slot_sharding), slots)
    return StepArguments(abstract_tree(params), cache, slots, embeddings)


def fresh_embeddings(arguments: StepArguments) -> Any:
    """Return an unused pool of embeddings for a step's arguments as shapes; None without an encoder."""
    return jax.tree.map(
        lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), arguments.embeddings
    )


def abstract_batch(shape: Shape, sizes: Sizes, sharding: Sharding) -> Batch:
    """Return the batch of a shape as ShapeDtypeStructs, with rows for every shard."""
    batch = with_packed_indices(empty_batch(sizes, shape, 0), shape, sizes)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch)


@dataclass(frozen=True)
class SamplerKey:
    """Key of the program that samples the rows of a step, in a table of programs."""

    rows: int

    @property
    def product_rows(self) -> int:
        return self.rows

    def __str__(self) -> str:
        return f"sample[{self.rows}]"


@dataclass(frozen=True)
class PromptKey:
    """Key of the program that scores or pools the prompts of a prefill [B,T], in a table of programs.

    result: field of `Output` that the program computes.
    """

    result: PromptResult
    rows: int
    tokens: int

    @property
    def product_rows(self) -> int:
        return SCORE_TILES[0]

    def __str__(self) -> str:
        return f"{self.result}[{self.rows},{self.tokens}]"


ProgramKey = Shape | SamplerKey | PromptKey | EncoderKey  # key of a program in a table


def prompt_keys(shapes: Iterable[Shape]) -> list[PromptKey]:
    """Return the programs that score and pool the prompts of the prefills among `shapes`."""
    prefills = [s for s in shapes if s.phase == "prefill"]
    return [PromptKey(result, s.rows, s.tokens) for s in prefills for result in get_args(PromptResult)]


def is_shape(program: ProgramKey) -> TypeGuard[Shape]:
    """Return True for the key of a step."""
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
    return gpu and gpu.compiler_options(product_rows, has_instance(arguments.params, InputQuantised))


@runtime_checkable
class ProgramLowering(Protocol):
    """Lowering of a table's programs for the placement of the parameters.

    phases: phases of the model.
    abstract_arguments: a step's arguments as shapes, with their placement.
    sizes: sizes of the engine.
    """

    @property
    def phases(self) -> Phases: ...
    @property
    def abstract_arguments(self) -> StepArguments: ...
    @property
    def sizes(self) -> Sizes: ...

    def join_parts(self, *programs: Any) -> Any:
        """Return one program of the compiled parts of a program that `lower` has lowered."""
        ...

    def choose_sampler(self, shape: Shape) -> SamplerKey | None:
        """Return the sampler of a shape; None if its step is one program."""
        ...

    def describe(self, program: ProgramKey) -> tuple[str, tuple[Any, ...]]:
        """Return what a program computes, as stored programs are named, and its arguments as shapes."""
        ...

    def lower(self, program: ProgramKey) -> Lowered:
        """Lower a program; of a step with a sampler its forward pass."""
        ...

    def lower_small(self) -> SmallPrograms:
        """Lower the small programs."""
        ...


@dataclass(frozen=True)
class ProgramDefinition:
    """Function that a program of a table computes, with its arguments.

    name: what it computes; the stored programs of other functions have other names.
    function: computes the results.
    operands: arguments as shapes; the first are parameters.
    donated: numbers of the arguments that are donated.
    out_shardings: placement of the results.
    in_specs, out_specs: PartitionSpecs over shards, of the arguments after the parameters and of the results.
    """

    name: str
    function: Callable[..., Any]
    operands: tuple[Any, ...]
    donated: tuple[int, ...]
    out_shardings: Any
    in_specs: tuple[Any, ...] = ()
    out_specs: Any = ()


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

    def join_parts(self, *programs: Any) -> Any:
        """Return the only part."""
        return join_single(*programs)

    @property
    def _replicated_sharding(self) -> Sharding:
        return self.abstract_arguments.replicated_sharding

    # ------------------------------------------------------------ a step

    def choose_sampler(self, shape: Shape) -> SamplerKey | None:
        """Return the sampler of a shape; None if its step is one program.

        A dispatch of several steps needs each token at once, and so do drafters.
        """
        is_single_decode = shape.phase == "decode" and shape.tokens == 1
        is_split = shape.phase == "prefill" or (is_single_decode and is_decode_split(self.abstract_arguments))
        if not isinstance(self.phases, TargetOnly) or not is_split:
            return None
        return SamplerKey(num_sample_rows(shape.rows, shape.tokens, self.sizes.max_num_seqs))

    def describe(self, program: ProgramKey) -> tuple[str, tuple[Any, ...]]:
        """Return what a program computes, and its arguments as shapes."""
        definition = self._define(program)
        return definition.name, definition.operands

    def lower(self, program: ProgramKey) -> jax.stages.Lowered:
        """Lower a program; of a step with a sampler its forward pass."""
        definition = self._define(program)
        function = definition.function
        if self.sizes.shards > 1:
            mesh, specs = mesh_of(self._replicated_sharding), (definition.in_specs, definition.out_specs)
            function = map_phase(function, definition.operands[0], mesh, *specs)
        jitted = jax.jit(function, donate_argnums=definition.donated, out_shardings=definition.out_shardings)
        return jitted.lower(*definition.operands)

    def lower_all(self, shape: Shape) -> list[jax.stages.Lowered]:
        """Lower the programs of a step: the step itself, or its forward pass and its sampler."""
        sampler = self.choose_sampler(shape)
        return [self.lower(shape)] if sampler is None else [self.lower(shape), self.lower(sampler)]

    def _define(self, program: ProgramKey) -> ProgramDefinition:
        match program:
            case Shape():
                return self._define_step(program)
            case SamplerKey():
                return self._define_sampler(program)
            case PromptKey():
                return self._define_prompt_program(program)
            case EncoderKey():
                return self._define_encoder(program)

    def _define_step(self, shape: Shape) -> ProgramDefinition:
        """Define a step, or its forward pass if a sampler follows. Cache and slots are donated, and keep
        their placement and layout."""
        arguments, replicated = self.abstract_arguments, self._replicated_sharding
        has_sampler = self.choose_sampler(shape) is not None
        name = "forward" if has_sampler else shape.phase
        batch = with_embedding_pool(abstract_batch(shape, self.sizes, replicated), arguments.embeddings)
        cache_shardings = jax.tree.map(lambda pool: pool.sharding, arguments.cache)
        num_row_results = 1 if has_sampler else 2  # the output, after the slots
        return ProgramDefinition(
            name,
            getattr(self.phases, name),
            (arguments.params, arguments.cache, arguments.slots, batch),
            donated=(1,) if has_sampler else (1, 2),
            out_shardings=(cache_shardings, *[replicated] * num_row_results),
            in_specs=(PAGE_SPEC, SLOT_SPEC, SLOT_SPEC),
            out_specs=(PAGE_SPEC, *[SLOT_SPEC] * num_row_results),
        )

    def _define_sampler(self, key: SamplerKey) -> ProgramDefinition:
        """Define the program that samples rows. The slots are donated."""
        assert isinstance(self.phases, TargetOnly)
        ints = self._abstract_rows(key.rows)
        hidden, is_sampling = self._abstract_hidden(key.rows), self._abstract_rows(key.rows, dtype=bool)
        rows = SampleRows(hidden, ints, ints, is_sampling)
        slots = self.abstract_arguments.slots
        return self._define_row_program("sample", self.phases.sample, slots, rows, donated=(1,))

    def _define_prompt_program(self, key: PromptKey) -> ProgramDefinition:
        """Define the program that scores the tokens after hidden states, or that pools rows of given
        lengths."""
        config, n_top = self.phases.config.target, self.sizes.n_top

        def score(params: Any, hidden: Any, following: Any) -> Scores:
            return score_prompts(params, config, hidden, following, n_top)

        def pool(params: Any, hidden: Any, count: Any) -> Pooled:
            return pool_hidden_states(hidden, count)

        hidden = self._abstract_hidden(key.rows, key.tokens)
        function, numbers = {
            "prompt": (score, self._abstract_rows(key.rows, key.tokens)),
            "pooled": (pool, self._abstract_rows(key.rows)),
        }[key.result]
        return self._define_row_program(f"{key.result} of {n_top}", function, hidden, numbers)

    def _define_row_program(
        self, name: str, function: Callable[..., Any], *operands: Any, donated: tuple[int, ...] = ()
    ) -> ProgramDefinition:
        """Define a program of the parameters of logits, and of two arguments by row or slot."""
        return ProgramDefinition(
            name,
            function,
            (logit_params(target_params(self.abstract_arguments.params)), *operands),
            donated,
            self._replicated_sharding,
            in_specs=(SLOT_SPEC, SLOT_SPEC),
            out_specs=SLOT_SPEC,
        )

    def _abstract_rows(self, rows: int, *shape: int, dtype: Any = jnp.int32) -> Any:
        """Return an array of `rows` rows of every shard as a shape."""
        shape = self.sizes.shards * rows, *shape
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self._replicated_sharding)

    def _abstract_hidden(self, *shape: int) -> Any:
        """Return hidden states by row, as `_abstract_rows`."""
        dtype = target_params(self.abstract_arguments.params).embed.dtype
        return self._abstract_rows(*shape, self.phases.config.target.hidden_size, dtype=dtype)

    def _define_encoder(self, key: EncoderKey) -> ProgramDefinition:
        """Define the program that encodes an input. The pool of embeddings is donated."""
        arguments, encoder = self.abstract_arguments, self.phases.config.target.encoder
        assert encoder is not None and isinstance(self.phases, TargetOnly)
        rows = jax.ShapeDtypeStruct((encoder.num_rows(key.items),), jnp.int32)
        inputs = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._replicated_sharding),
            (rows, encoder.abstract_input(key.items)),
        )
        operands = target_params(arguments.params).encoder, arguments.embeddings, *inputs
        return ProgramDefinition("encode", self.phases.encode, operands, (1,), self._replicated_sharding)

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

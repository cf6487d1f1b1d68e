"""The closed table of shapes: programs are compiled ahead of time, and only compiled ones are called."""

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Int

from ...kvcache.pages import ON_DEVICE, Batch, KVCache, empty_cache, pool_dtype
from ...kvcache.placement import automatic, cache_shardings, everywhere
from ...model.pair import PairConfig, Params, target_of
from ...sampling.state import load_history
from ..host import progress
from . import kept
from .phases import Phases
from .shapes import Shape, Sizes
from .step import Output, Seat, Slots, empty_slots, seat
from .tuning import tuning


@dataclass(frozen=True)
class Arguments:
    """What every step takes besides its batch, as arrays or as shapes without numbers."""

    params: Params
    cache: KVCache
    slots: Slots

    @property
    def everywhere(self) -> Sharding:
        """Whole on each device."""
        return self.slots.last.sharding


def like(tree: Any) -> Any:
    """Shapes, types and placement of a tree's arrays, without their numbers."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=automatic(x.sharding)), tree
    )


def empty_state(config: PairConfig, sizes: Sizes, dtype: Any, stored: Any) -> tuple[KVCache, Slots]:
    """A cache and slots that nobody has used; some devices store a pool's numbers as another type."""
    cache = empty_cache(config.layers, sizes.pages, sizes.page_size, stored)
    hidden = jax.ShapeDtypeStruct((sizes.hidden,), dtype) if sizes.hidden else None
    return cache, empty_slots(sizes.max_num_seqs, config.target.vocab_size, hidden, sizes.n_top)


def arguments_like(config: PairConfig, params: Params, sizes: Sizes) -> Arguments:
    """A step's arguments as shapes: the cache and the slots lie where the parameters, arrays or shapes too,
    ask for them."""

    def at(x: Any, where: Sharding) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    whole, dtype = everywhere(params), target_of(params).embed.dtype
    (device, *_) = whole.device_set
    cache, slots = jax.eval_shape(lambda: empty_state(config, sizes, dtype, pool_dtype(dtype, device)))
    cache = jax.tree.map(at, cache, cache_shardings(config.layers, params))
    return Arguments(like(params), cache, jax.tree.map(lambda x: at(x, whole), slots))


def batch_like(shape: Shape, sizes: Sizes, sharding: Sharding) -> Batch:
    """The abstract batch of a shape."""

    def ints(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.int32, sharding=sharding)

    B, T = shape.rows, shape.tokens
    tables = tuple(ints(B, sizes.table_width) for _ in sizes.pages)
    packed = ints(shape.packed) if shape.packed else None
    return Batch(ints(B, T), ints(B), ints(B), tables, ints(B), packed)


def lower(phases: Phases, shape: Shape, arguments: Arguments, sizes: Sizes) -> jax.stages.Lowered:
    """One step's program. The cache and the slots are donated, and stay where and how they are."""
    whole = arguments.everywhere
    out = jax.tree.map(lambda pool: pool.sharding, arguments.cache), whole, whole
    jitted = jax.jit(getattr(phases, shape.phase), donate_argnums=(1, 2), out_shardings=out)
    return jitted.lower(*operands(shape, arguments, sizes))


def operands(shape: Shape, arguments: Arguments, sizes: Sizes) -> tuple[Any, ...]:
    """What a step's program takes, without numbers."""
    batch = batch_like(shape, sizes, arguments.everywhere)
    return arguments.params, arguments.cache, arguments.slots, batch


def load_kept(
    pool: ThreadPoolExecutor, keys: Mapping[Shape, str | None], everywhere: Sharding
) -> dict[Shape, Any]:
    """The programs that are kept under keys, None where one is not."""
    (device, *_) = everywhere.device_set
    with progress.stage("reading kept programs", len(keys), progress.PATIENCE) as done:
        found = pool.map(lambda key: done(kept.load(key, device)), keys.values())
        return dict(zip(keys, found, strict=True))


def compiling(count: int) -> str:
    """What a start says while it compiles."""
    what = "1 program" if count == 1 else f"{count} programs"
    return (
        f"compiling {what}, kept for the next start"
        if jax.config.values["jax_compilation_cache_dir"]
        else f"compiling {what}"
    )


class Programs:
    """Compiled steps by shape, the two small programs that seat a request, and the empty state that all of
    them start from."""

    def __init__(self, phases: Phases, params: Params, sizes: Sizes, shapes: Iterable[Shape]):
        started = time.perf_counter()
        self.config, self.sizes = phases.config, sizes
        arguments = arguments_like(phases.config, params, sizes)
        self._devices = arguments.everywhere.device_set
        keys = {s: kept.key(phases, s.phase, operands(s, arguments, sizes)) for s in shapes}
        with ThreadPoolExecutor(2) as pool:
            self.steps = load_kept(pool, keys, arguments.everywhere)
            missing = [s for s, program in self.steps.items() if program is None]
            with progress.stage(compiling(len(missing)), len(missing)) as done:
                jobs = (lower(phases, s, arguments, sizes) for s in missing)
                compiled = pool.map(lambda s, job: done(kept.compile(keys[s], job)), missing, jobs)
                self.steps |= zip(missing, compiled, strict=True)
        self.key, self.loaded, self._keys = kept.combined(keys.values()), not missing, keys
        self.seat = self._compile_seat(arguments)
        self.load_history = self._compile_history(arguments, sizes.max_model_len)
        self.fresh = self._compile_fresh(arguments)
        self.count = len(self.steps) + 3
        self.seconds = time.perf_counter() - started

    def products(self, shapes: Iterable[Shape]) -> str | None:
        """How an accelerator's products in these shapes were configured, as a hash, kept with the programs;
        None on a host, whose are known by its processor."""
        (device, *_) = self._devices
        if device.platform == "cpu":
            return None
        chosen = sorted(shapes)
        own = kept.combined([self._keys[shape] for shape in chosen], "products")
        found = kept.read(own, str) if self.loaded else None
        if found is None:
            found = tuning(self.steps[shape] for shape in chosen)
            kept.write(own, found)
        return found

    def empty(self, params: Params) -> Arguments:
        """Parameters with a cache and slots that nobody has used."""
        return Arguments(params, *self.fresh())

    def _compile_fresh(self, arguments: Arguments):
        dtypes = target_of(arguments.params).embed.dtype, arguments.cache.k[0].dtype
        out = jax.tree.map(lambda x: x.sharding, (arguments.cache, arguments.slots))
        fresh = jax.jit(lambda: empty_state(self.config, self.sizes, *dtypes), out_shardings=out)
        return fresh.lower().compile()

    def _compile_seat(self, arguments: Arguments):
        slots, whole = arguments.slots, arguments.everywhere
        knobs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), slots.sampling.knobs)
        one = jax.ShapeDtypeStruct((), jnp.int32)
        new = Seat(one, one, jax.ShapeDtypeStruct((), bool), knobs)
        return jax.jit(seat, donate_argnums=0, out_shardings=whole).lower(slots, one, new).compile()

    def _compile_history(self, arguments: Arguments, history: int):
        slots, whole = arguments.slots, arguments.everywhere

        def load(slots, slot, tokens, prompt_len, total_len, bias):
            sampling = load_history(slots.sampling, slot, tokens, prompt_len, total_len, bias)
            return replace(slots, sampling=sampling)

        one, V = jax.ShapeDtypeStruct((), jnp.int32), slots.sampling.bias.shape[1]
        tokens, bias = jax.ShapeDtypeStruct((history,), jnp.int32), jax.ShapeDtypeStruct((V,), jnp.float32)
        jitted = jax.jit(load, donate_argnums=0, out_shardings=whole)
        return jitted.lower(slots, one, tokens, one, one, bias).compile()

    def run(self, shape: Shape, arguments: Arguments, batch: Batch) -> tuple[KVCache, Slots, Output]:
        """Dispatch one step; the cache and the slots that are passed are consumed."""
        if shape.packed:
            batch = replace(batch, packed=packed(batch, shape.packed))
        return self.steps[shape](arguments.params, arguments.cache, arguments.slots, batch)

    def empty_batch(self, shape: Shape, empty_slot: int) -> Batch:
        """A host batch of empty rows, to be filled in."""
        B, T = shape.rows, shape.tokens
        tables = tuple(np.zeros((B, self.sizes.table_width), np.int32) for _ in self.sizes.pages)
        slot = np.full(B, empty_slot, np.int32)
        return Batch(
            np.full((B, T), ON_DEVICE, np.int32), np.zeros(B, np.int32), np.zeros(B, np.int32), tables, slot
        )


def packed(batch: Batch, rows: int) -> Int[np.ndarray, " rows"]:
    """The places that hold a host batch's tokens, B*T for the rest; at most `rows` of them may."""
    B, T = batch.tokens.shape
    real = np.flatnonzero(np.arange(T) < batch.count[:, None])
    assert len(real) <= rows, f"{len(real)} tokens are too many for a verification of {rows}"
    return np.pad(real, (0, rows - len(real)), constant_values=B * T).astype(np.int32)


def fill(
    batch: Batch,
    row: int,
    tokens: Int[np.ndarray, " T"] | list[int],
    start: int,
    pages: Sequence[Int[np.ndarray, " M"] | list[int]],
    slot: int,
) -> None:
    """Write one row of a host batch; `pages` has the row's own for each window."""
    batch.tokens[row, : len(tokens)] = tokens
    batch.start[row], batch.count[row], batch.slot[row] = start, len(tokens), slot
    for table, own in zip(batch.page_tables, pages, strict=True):
        table[row, : len(own)] = own

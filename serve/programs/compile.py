"""The closed table of shapes: programs are compiled ahead of time, and only compiled ones are called."""

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jaxtyping import Int

from ...kvcache.pages import ON_DEVICE, Batch, KVCache, empty_cache
from ...kvcache.placement import automatic, cache_shardings, everywhere
from ...kvcache.quantised import kept_as
from ...model.pair import PairConfig, Params, target_of
from ...sampling.params import NO_TOKEN
from ...sampling.state import load_history
from ..host import progress
from . import kept
from .phases import Phases
from .places import packed
from .shapes import Shape, Sizes
from .step import Output, Seat, Slots, empty_slots, seat
from .tuning import tuning

SMALL = 4  # programs beside the steps: seat, history, cache and slots


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


def fresh_slots(config: PairConfig, sizes: Sizes, dtype: Any) -> Slots:
    """Slots that nobody has used."""
    hidden = jax.ShapeDtypeStruct((sizes.hidden,), dtype) if sizes.hidden else None
    return empty_slots(sizes.max_num_seqs, config.target.vocab_size, hidden, sizes.n_top)


def arguments_like(config: PairConfig, params: Params, sizes: Sizes) -> Arguments:
    """A step's arguments as shapes: the cache and the slots lie where the parameters, arrays or shapes too,
    ask for them."""

    def at(x: Any, where: Sharding) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    whole, dtype = everywhere(params), target_of(params).embed.dtype
    (device, *_) = whole.device_set
    kept = kept_as(sizes.kv_cache_dtype, dtype)
    cache = jax.eval_shape(lambda: empty_cache(config.layers, sizes.pages, sizes.page_size, kept, device))
    slots = jax.eval_shape(lambda: fresh_slots(config, sizes, dtype))
    places = cache_shardings(config.layers, params)  # one for a pool and its scales
    cache = jax.tree.map(lambda where, pool: jax.tree.map(lambda x: at(x, where), pool), places, cache)
    return Arguments(like(params), cache, jax.tree.map(lambda x: at(x, whole), slots))


def batch_like(shape: Shape, sizes: Sizes, sharding: Sharding) -> Batch:
    """The abstract batch of a shape."""

    def ints(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.int32, sharding=sharding)

    B, T = shape.rows, shape.tokens
    tables = tuple(ints(B, sizes.table_width) for _ in sizes.pages)
    after = ints(B) if shape.phase == "prefill" else None
    packed = ints(shape.packed) if shape.packed else None
    return Batch(ints(B, T), ints(B), ints(B), tables, ints(B), after, packed)


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


def compiling(count: int, later: int = 0) -> str:
    """What a start says while it compiles."""
    what = "1 program" if count == 1 else f"{count} programs"
    kept_too = ", kept for the next start" if jax.config.values["jax_compilation_cache_dir"] else ""
    return f"compiling {what}{kept_too}" + (f"; {later} more while they serve" if later else "")


class Programs:
    """Compiled steps by shape, the small programs that seat a request and load its history, and those that
    make the empty state that all of them start from.

    Of the shapes `first` are there once it is made, all if None. `missing` are then compiled by `add`, from
    any thread. `ready` has the seconds from the start on after which each was there.
    """

    def __init__(
        self,
        phases: Phases,
        params: Params,
        sizes: Sizes,
        shapes: Iterable[Shape],
        first: Collection[Shape] | None = None,
    ):
        self.started = time.perf_counter()
        self.config, self.sizes, self._phases = phases.config, sizes, phases
        self.like = like = arguments_like(phases.config, params, sizes)
        self._devices, self._lowering = like.everywhere.device_set, threading.Lock()
        self._keys = {s: self._key(s) for s in shapes}
        with ThreadPoolExecutor(max(2, kept.cores() or 0)) as pool:
            found = load_kept(pool, self._keys, like.everywhere)
            self.steps = {s: program for s, program in found.items() if program is not None}
            self.ready = dict.fromkeys(self.steps, self.age)
            lacking = [s for s in found if s not in self.steps]
            self.key, self.loaded = kept.combined(self._keys.values()), not lacking
            now = [s for s in lacking if first is None or s in first]
            self.missing = [s for s in lacking if s not in now]
            with progress.stage(compiling(len(now), len(self.missing)), len(now)) as done:
                # lowered here: in other threads the user's settings for a block of code do not hold
                jobs = [pool.submit(self._compile, s, self._lower(s)) for s in now]
                made = pool.map(jax.stages.Lowered.compile, self._small())
                self.seat, self.load_history, self.fresh_cache, self.fresh_slots = made
                for job in as_completed(jobs):
                    done(job.result())
        self.steps = {s: self.steps[s] for s in found if s in self.steps}  # in the table's order
        self.seconds = self.age

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    @property
    def count(self) -> int:
        return len(self.steps) + SMALL

    def report(self) -> dict[str, Any]:
        """How many there are, the seconds of the start, and when each was there."""
        ready = {str(shape): round(t, 3) for shape, t in sorted(self.ready.items())}
        return {"programs": self.count, "warmup_seconds": self.seconds, "compiled_at": ready}

    def add(self, shape: Shape) -> None:
        """Compile a missing shape; it is not kept if jax's settings are others than at the start."""
        if self._keys[shape] != self._key(shape):
            self._keys[shape] = None
        self._compile(shape, self._lower(shape))

    def _key(self, shape: Shape) -> str | None:
        return kept.key(self._phases, shape.phase, operands(shape, self.like, self.sizes))

    def _lower(self, shape: Shape) -> jax.stages.Lowered:
        with self._lowering:  # one at a time: it is Python
            return lower(self._phases, shape, self.like, self.sizes)

    def _compile(self, shape: Shape, lowered: jax.stages.Lowered) -> None:
        program = kept.compile(self._keys[shape], lowered)
        self.steps[shape], self.ready[shape] = program, self.age

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
        return Arguments(params, self.fresh_cache(), self.fresh_slots())

    def _small(self) -> list[jax.stages.Lowered]:
        return [self._lower_seat(), self._lower_history(), self._lower_cache(), self._lower_slots()]

    def _lower_cache(self) -> jax.stages.Lowered:
        like = self.like.cache

        def fresh() -> KVCache:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

        return jax.jit(fresh, out_shardings=jax.tree.map(lambda x: x.sharding, like)).lower()

    def _lower_slots(self) -> jax.stages.Lowered:
        dtype = target_of(self.like.params).embed.dtype
        fresh = partial(fresh_slots, self.config, self.sizes, dtype)
        return jax.jit(fresh, out_shardings=self.like.everywhere).lower()

    def _lower_seat(self) -> jax.stages.Lowered:
        slots, whole = self.like.slots, self.like.everywhere
        knobs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), slots.sampling.knobs)
        one = jax.ShapeDtypeStruct((), jnp.int32)
        new = Seat(one, one, one, knobs)
        return jax.jit(seat, donate_argnums=0, out_shardings=whole).lower(slots, one, new)

    def _lower_history(self) -> jax.stages.Lowered:
        slots, whole = self.like.slots, self.like.everywhere

        def load(slots, slot, tokens, prompt_len, total_len, bias):
            sampling = load_history(slots.sampling, slot, tokens, prompt_len, total_len, bias)
            return replace(slots, sampling=sampling)

        one, V = jax.ShapeDtypeStruct((), jnp.int32), slots.sampling.bias.shape[1]
        tokens = jax.ShapeDtypeStruct((self.sizes.max_model_len,), jnp.int32)
        bias = jax.ShapeDtypeStruct((V,), jnp.float32)
        jitted = jax.jit(load, donate_argnums=0, out_shardings=whole)
        return jitted.lower(slots, one, tokens, one, one, bias)

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
        tokens, start, count = (
            np.full((B, T), ON_DEVICE, np.int32),
            np.zeros(B, np.int32),
            np.zeros(B, np.int32),
        )
        after = np.full(B, NO_TOKEN, np.int32) if shape.phase == "prefill" else None
        return Batch(tokens, start, count, tables, slot, after)


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

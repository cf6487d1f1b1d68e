"""The closed table of shapes: programs are compiled ahead of time, and only compiled ones are called."""

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, Sharding

from ....kvcache.pages import Batch, empty_cache
from ....kvcache.placement import automatic, cache_shardings
from ....kvcache.placement import seats as seats_of
from ....kvcache.quantised import kept_as
from ....kvcache.shards import PAGES, SEATS, in_seat, steps
from ....kvcache.stages import around
from ....model.gpus import gpu_of, without
from ....model.pair import PairConfig, Params, target_of
from ....model.weights.cpu.packed import kernels_in
from ....model.weights.prepared import lanes_of
from ....sampling.state import Allowed, load_history, load_masks
from ...host import progress
from ...host.process import release
from ...host.streams import first_line, warn
from ..steps.phases import Phases, TargetOnly
from ..steps.step import Seat, Slots, empty_slots, seat
from . import executable_cache
from .batches import BatchRow, batch_of, empty_batch, with_places
from .executable_cache import JoinedPrograms, Lowered
from .futures import DeferredSampling
from .shapes import Shape, Sizes
from .tuning import tuning

THREADS = "duetto-warmup"  # how the names of the threads that compile begin
SMALL = 5  # programs beside the steps: seat, history, masks, cache and slots
MASKED_AT_ONCE = 8  # seats whose masks are written by one call


@dataclass(frozen=True)
class StepArguments:
    """Arguments of every step besides its batch, as arrays or as shapes; cache and slots may be futures."""

    params: Params
    cache: Any  # KVCache
    slots: Any  # Slots

    @property
    def everywhere(self) -> Sharding:
        """Sharding of arrays that are whole on each device; each shard has its own."""
        return self.slots.last.sharding


def like(tree: Any) -> Any:
    """Return the shapes, dtypes and placement of a tree's arrays."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=automatic(x.sharding)), tree
    )


def fresh_slots(config: PairConfig, sizes: Sizes, dtype: Any) -> Slots:
    hidden = jax.ShapeDtypeStruct((sizes.hidden,), dtype) if sizes.hidden else None
    V, S = config.target.vocab_size, sizes.max_model_len if sizes.processors else 0
    return empty_slots(sizes.seats, V, hidden, sizes.n_top, sizes.positions, sizes.processors, S)


def arguments_like(config: PairConfig, params: Params, sizes: Sizes) -> StepArguments:
    """Return a step's arguments as shapes: cache and slots lie where the parameters, arrays or shapes too,
    require."""

    def at(x: Any, where: Sharding) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)

    dtype, seats = target_of(params).embed.dtype, seats_of(params, sizes.shards)
    pages = tuple(sizes.shards * count for count in sizes.pages)
    (device, *_) = seats.device_set
    kept, isa = kept_as(sizes.kv_cache_dtype, dtype), kernels_in(params)
    lanes = lanes_of(seats.device_set, sizes.shards)
    empty = partial(empty_cache, config.layers, pages, sizes.page_size, kept, device, isa, lanes)
    cache = jax.eval_shape(empty)
    slots = jax.eval_shape(lambda: fresh_slots(config, sizes, dtype))
    places = cache_shardings(config.layers, params, sizes.shards)  # one for a pool and its scales
    cache = jax.tree.map(lambda where, pool: jax.tree.map(lambda x: at(x, where), pool), places, cache)
    return StepArguments(like(params), cache, jax.tree.map(lambda x: at(x, seats), slots))


def batch_like(shape: Shape, sizes: Sizes, sharding: Sharding) -> Batch:
    """Return the batch of a shape as shapes, with rows for every shard."""
    batch = with_places(empty_batch(sizes, shape, 0), shape, sizes)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), batch)


def seat_like(slots: Slots, sizes: Sizes) -> tuple[Any, ...]:
    """Return the arguments of `seat` behind the slots, as shapes."""
    knobs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), slots.sampling.knobs)
    one = jax.ShapeDtypeStruct((), jnp.int32)
    return one, Seat(one, one, one, knobs, one)


def history_like(slots: Slots, sizes: Sizes) -> tuple[Any, ...]:
    """Return the arguments of `load_history` behind the slots: slot, tokens, the prompt's and all tokens'
    number, bias."""
    one, V = jax.ShapeDtypeStruct((), jnp.int32), slots.sampling.bias.shape[1]
    tokens = jax.ShapeDtypeStruct((sizes.max_model_len,), jnp.int32)
    return one, tokens, one, one, jax.ShapeDtypeStruct((V,), jnp.float32)


def masks_like(slots: Slots, sizes: Sizes) -> tuple[Any, ...]:
    """Return the arguments of `load_masks` behind the slots: slots, the first position of each, masks."""
    K, rows = MASKED_AT_ONCE, slots.sampling.allowed.masks
    some = jax.ShapeDtypeStruct((K,), jnp.int32)
    return some, some, jax.ShapeDtypeStruct((K, *rows.shape[1:]), rows.dtype)


# Programs that change the slots, and their arguments behind these.
SLOT_PROGRAMS = {"seat": seat_like, "load_history": history_like, "load_masks": masks_like}


def in_slots(load: Callable[..., Allowed]) -> Callable[..., Slots]:
    """Wrap a program that loads masks to take all slots. It is called often, and each array argument costs
    time."""

    def change(slots: Slots, *given: Any) -> Slots:
        allowed = load(slots.sampling.allowed, *given)
        return replace(slots, sampling=replace(slots.sampling, allowed=allowed))

    return change


def lower(phases: Phases, shape: Shape, arguments: StepArguments, sizes: Sizes) -> jax.stages.Lowered:
    """Lower a step's program. Cache and slots are donated, and keep placement and layout."""
    whole = arguments.everywhere
    out = jax.tree.map(lambda pool: pool.sharding, arguments.cache), whole, whole
    phase = getattr(phases, shape.phase)
    if sizes.shards > 1:
        phase = steps(phase, arguments.params, mesh_of(whole))
    jitted = jax.jit(phase, donate_argnums=(1, 2), out_shardings=out)
    return jitted.lower(*operands(shape, arguments, sizes))


def lower_deferred(phases: Phases, shape: Shape, arguments: StepArguments, sizes: Sizes) -> JoinedPrograms:
    """Lower a decode as two programs: the forward pass, and the draw of tokens from its hidden states."""
    assert isinstance(phases, TargetOnly), "what guesses needs each token at once"
    params, cache, slots, batch = given = operands(shape, arguments, sizes)
    ends, whole = around(params), slots.last.sharding
    forward, draw = phases.forward, phases.draw
    if sizes.shards > 1:
        forward = steps(forward, params, mesh_of(whole), made=(PAGES, SEATS))
        draw = steps(draw, ends, mesh_of(whole), (SEATS, SEATS, SEATS), (SEATS, SEATS))
    out = jax.tree.map(lambda pool: pool.sharding, cache), whole
    first = jax.jit(forward, donate_argnums=1, out_shardings=out).trace(*given)
    hidden = jax.ShapeDtypeStruct(first.out_info[1].shape, first.out_info[1].dtype, sharding=whole)
    second = jax.jit(draw, donate_argnums=1, out_shardings=whole).lower(ends, slots, batch, hidden)
    return JoinedPrograms([first.lower(), second], DeferredSampling)


def mesh_of(place: Sharding) -> Mesh:
    assert isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh)
    return place.mesh


def operands(shape: Shape, arguments: StepArguments, sizes: Sizes) -> tuple[Any, ...]:
    """Return the arguments of a step's program as shapes."""
    batch = batch_like(shape, sizes, arguments.everywhere)
    return arguments.params, arguments.cache, arguments.slots, batch


def lower_zeros(like: Any) -> jax.stages.Lowered:
    """Lower a program that makes arrays of zeros with these shapes and placements."""

    def zeros() -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)

    return jax.jit(zeros, out_shardings=jax.tree.map(lambda x: x.sharding, like)).lower()


def compiling(count: int, later: int = 0) -> str:
    what = "1 program" if count == 1 else f"{count} programs"
    kept_too = ", kept for the next start" if jax.config.values["jax_compilation_cache_dir"] else ""
    return f"compiling {what}{kept_too}" + (f"; {later} more while they serve" if later else "")


class Programs:
    """Compiled steps by shape, and the small programs: they assign a slot to a request, load its history and
    the masks of grammars, and make the empty cache and slots.

    Shapes of `first`, by default all, are compiled at once. `missing` ones are compiled later by `add`, from
    any thread. No program has a kernel that is `refused`. With `reproducible`, steps are compiled so that
    bits do not depend on the number of rows. `ready` has the seconds after the start at which each was
    there, `spent` the seconds of tracing and compiling.
    """

    def __init__(
        self,
        phases: Phases,
        params: Params,
        sizes: Sizes,
        shapes: Iterable[Shape],
        first: Collection[Shape] | None = None,
        refused: tuple[str, ...] = (),
        reproducible: bool = False,
    ):
        self.refused, self.reproducible = refused, reproducible
        self.started = time.perf_counter()
        self.config, self.sizes, self._phases = phases.config, sizes, phases
        self.like = like = arguments_like(phases.config, params, sizes)
        self._devices, self._lowering = like.everywhere.device_set, threading.Lock()
        self._gpu = gpu_of(next(iter(self._devices)))
        self._keys = {s: self._key(s) for s in shapes}
        with ThreadPoolExecutor(max(2, executable_cache.cores() or 0)) as pool:
            found = executable_cache.load_all(pool, self._keys, like.everywhere, self._join)
            self.steps = {s: program for s, program in found.items() if program is not None}
            self.ready = dict.fromkeys(self.steps, self.age)
            lacking = [s for s in found if s not in self.steps]
            self.key, self.loaded = executable_cache.combined(self._keys.values()), not lacking
            self.read, self.spent = len(self.steps), executable_cache.Spent(self.key)
            now = [s for s in lacking if first is None or s in first]
            self.missing = [s for s in lacking if s not in now]
            with progress.stage(compiling(len(now), len(self.missing)), len(now)) as done:
                # lowered here: in other threads the user's settings for a block of code do not hold
                jobs = [pool.submit(self._compile, s, self._lowered(s)) for s in now]
                made = pool.map(lambda small: small.compile(compiler_options=self._options()), self._small())
                self.seat, self.load_history, self.load_masks, self.fresh_cache, self.fresh_slots = made
                for job in as_completed(jobs):
                    done(job.result())
        self.steps = {s: self.steps[s] for s in found if s in self.steps}  # in the table's order
        self.seconds = self.age
        self.spent.keep(together=self.seconds)

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    @property
    def count(self) -> int:
        return len(self.steps) + SMALL

    def report(self) -> dict[str, Any]:
        """Return the number of programs, of those read from disk and missing, seconds of the start and of
        compiling, and when each step was ready."""
        ready = {str(shape): round(t, 3) for shape, t in sorted(self.ready.items())}
        return {
            "programs": self.count,
            "programs_read": self.read,
            "programs_missing": len(self._keys.keys() - self.steps.keys()),
            "warmup_seconds": self.seconds,
            "compile_seconds": sum(self.spent.seconds.values()),
            "compiled_at": ready,
        }

    def begin(self, state: StepArguments) -> None:
        """Start counting: requests come from now on."""

    def close(self) -> None:
        """End what the programs hold besides memory."""

    def add(self, shape: Shape) -> None:
        """Compile a missing shape, or one of no table. The latter is not kept, nor is any if jax's settings
        have changed since the start."""
        if self._keys.setdefault(shape) != self._key(shape):
            self._keys[shape] = None
        self._compile(shape, self._lowered(shape))
        self.spent.keep()

    def _key(self, shape: Shape) -> str | None:
        given = operands(shape, self.like, self.sizes)
        return executable_cache.key(self._phases, shape.phase, given, self.refused, self._options(shape))

    def _options(self, shape: Shape | None = None) -> dict[str, str] | None:
        """XLA's options for a step or a small program; None where they are its own."""
        return self._gpu and self._gpu.options(shape.product_rows if shape and self.reproducible else 0)

    @property
    def _join(self) -> Callable[..., Any]:
        """Join the parts of a stored step to one program."""
        return executable_cache.alone

    def _lowered(self, shape: Shape) -> Lowered:
        with without(self.refused):
            return self._lower(shape)

    def _lower(self, shape: Shape) -> Lowered:
        with self._lowering, self.spent.on(shape):  # one at a time: it is Python
            make = lower_deferred if shape.phase == "deferred" else lower
            return make(self._phases, shape, self.like, self.sizes)

    def _compile(self, shape: Shape, lowered: Lowered) -> None:
        with self.spent.on(shape):
            program = self._compiled(shape, lowered)
        self.steps[shape], self.ready[shape] = program, self.age

    def _compiled(self, shape: Shape, lowered: Lowered) -> Any:
        own, usual = self._options(shape), self._options()
        try:
            return executable_cache.compile(self._keys[shape], lowered, own)
        except jax.errors.JaxRuntimeError as error:
            if own == usual:
                raise
            warn(f"{shape} may have bits of its own: it has no program without cuBLAS: {first_line(error)}")
            return executable_cache.compile(self._keys[shape], lowered, usual)

    def products(self, shapes: Iterable[Shape]) -> str | None:
        """Return a hash of how an accelerator's matrix products in these shapes were configured, kept with
        the programs; None on a CPU, which `provenance` describes."""
        (device, *_) = self._devices
        if device.platform == "cpu":
            return None
        chosen = sorted(shapes)
        own = executable_cache.combined([self._keys[shape] for shape in chosen], "products")
        found = executable_cache.read(own, str) if self.loaded else None
        if found is None:
            found = tuning(self.steps[shape] for shape in chosen)
            executable_cache.write(own, found)
        return found

    def empty(self, params: Params, failed: BaseException | None = None) -> StepArguments:
        """Return parameters with an unused cache and unused slots, made after those that a failed step held
        are released."""
        release(failed)
        return StepArguments(params, self.fresh_cache(), self.fresh_slots())

    def _small(self) -> list[Lowered]:
        return [self._lower_seat(), *self._lower_loads(), self._lower_cache(), self._lower_slots()]

    def _lower_cache(self) -> Lowered:
        return lower_zeros(self.like.cache)

    def _lower_slots(self) -> Lowered:
        dtype = target_of(self.like.params).embed.dtype
        fresh = partial(fresh_slots, self.config, self.sizes, dtype)
        return jax.jit(fresh, out_shardings=self.like.everywhere).lower()

    def _lower_seat(self) -> Lowered:
        slots = self.like.slots
        return self._of_seat(seat).lower(slots, *seat_like(slots, self.sizes))

    def _of_seat(self, change: Callable[..., Any]) -> Any:
        whole = self.like.everywhere
        if self.sizes.shards > 1:
            change = in_seat(change, mesh_of(whole))
        return jax.jit(change, donate_argnums=0, out_shardings=whole)

    def _lower_loads(self) -> list[Lowered]:
        """Lower the programs that load a request's history, and the masks of grammars."""
        slots = self.like.slots

        def load(slots, slot, tokens, prompt_len, total_len, bias):
            sampling = load_history(slots.sampling, slot, tokens, prompt_len, total_len, bias)
            return replace(slots, sampling=sampling)

        history = self._of_seat(load).lower(slots, *history_like(slots, self.sizes))
        masks = self._of_seat(load_masks).lower(slots.sampling.allowed, *masks_like(slots, self.sizes))
        return [history, JoinedPrograms([masks], in_slots)]

    def run(self, shape: Shape, arguments: StepArguments, batch: Batch) -> tuple[Any, Any, Any]:
        """Dispatch a step, which consumes the cache and the slots; returns others, and the Output."""
        batch = with_places(batch, shape, self.sizes)
        return self.steps[shape](arguments.params, arguments.cache, arguments.slots, batch)

    def batch(self, shape: Shape, rows: Mapping[int, BatchRow]) -> Batch:
        return batch_of(self.sizes, shape, rows)

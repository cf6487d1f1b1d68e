"""The closed table of shapes: every program is compiled ahead of time, and only compiled programs are called."""

import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..kvcache.pages import BLOCK, Batch, KVCache, empty_cache
from ..model.config import ModelConfig
from ..model.transformer import Decoder
from ..sampling.state import load_history
from .step import Output, Seat, Slots, decode, empty_slots, prefill, seat, verify

Phase = Literal["prefill", "decode", "verify"]
PHASES = {"prefill": prefill, "decode": decode, "verify": verify}


class Shape(NamedTuple):
    """Rows B and tokens T of one compiled step; for decode T is the number of steps taken in one dispatch."""

    phase: Phase
    rows: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.phase}[{self.rows},{self.tokens}]"


@dataclass(frozen=True)
class Sizes:
    """An engine's fixed shapes: tokens of a request, seats, pages, tokens of a page."""

    max_model_len: int
    max_num_seqs: int
    pages: int
    page_size: int

    @property
    def table_width(self) -> int:
        """Pages of a row, M, rounded up to whole blocks of attention."""
        tokens = -(-self.max_model_len // BLOCK) * BLOCK
        return -(-tokens // self.page_size)


@dataclass(frozen=True)
class Arguments:
    """What every step takes besides its batch, as arrays or as shapes without numbers."""

    params: Decoder
    cache: KVCache
    slots: Slots


def like(tree: Any) -> Any:
    """Shapes, types and placement of a tree's arrays, without their numbers."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def batch_like(shape: Shape, table_width: int, sharding: jax.sharding.Sharding | None = None) -> Batch:
    """The abstract batch of a shape; M is the page table's width."""

    def ints(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.int32, sharding=sharding)

    B, T = shape.rows, shape.tokens
    return Batch(ints(B, T), ints(B), ints(B), ints(B, table_width), ints(B))


def lower(
    shape: Shape, config: ModelConfig, arguments: Arguments, batch: Batch, out_shardings: Any = None
) -> jax.stages.Lowered:
    """One step's program with the cache and the slots donated."""
    step = partial(PHASES[shape.phase], config=config)
    jitted = jax.jit(step, donate_argnums=(1, 2), out_shardings=out_shardings)
    return jitted.lower(arguments.params, arguments.cache, arguments.slots, batch)


class Programs:
    """Compiled steps by shape, the two small programs that seat a request, and the empty state that all of them start from."""

    def __init__(self, config: ModelConfig, params: Decoder, sizes: Sizes, shapes: Iterable[Shape]):
        started = time.perf_counter()
        self.config, self.sizes, self.table_width = config, sizes, sizes.table_width
        empty = self.empty(params)
        arguments = Arguments(like(params), like(empty.cache), like(empty.slots))
        jobs = {s: lower(s, config, arguments, batch_like(s, self.table_width)) for s in shapes}
        with ThreadPoolExecutor(2) as pool:
            self.steps = dict(zip(jobs, pool.map(lambda job: job.compile(), jobs.values()), strict=True))
        self.seat = self._compile_seat(arguments.slots)
        self.load_history = self._compile_history(arguments.slots, sizes.max_model_len)
        self.count = len(self.steps) + 2
        self.seconds = time.perf_counter() - started

    def empty(self, params: Decoder) -> Arguments:
        """Parameters with a cache and slots that nobody has used."""
        sizes = self.sizes
        cache = empty_cache(self.config, sizes.pages, sizes.page_size, params.embed.dtype)
        return Arguments(params, cache, empty_slots(sizes.max_num_seqs, self.config.vocab_size))

    def _compile_seat(self, slots: Slots):
        knobs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), slots.sampling.knobs)
        one = jax.ShapeDtypeStruct((), jnp.int32)
        new = Seat(one, one, jax.ShapeDtypeStruct((), bool), knobs)
        return jax.jit(seat, donate_argnums=0).lower(slots, one, new).compile()

    def _compile_history(self, slots: Slots, history: int):
        def load(slots, slot, tokens, prompt_len, total_len, bias):
            sampling = load_history(slots.sampling, slot, tokens, prompt_len, total_len, bias)
            return replace(slots, sampling=sampling)

        one, V = jax.ShapeDtypeStruct((), jnp.int32), slots.sampling.bias.shape[1]
        tokens, bias = jax.ShapeDtypeStruct((history,), jnp.int32), jax.ShapeDtypeStruct((V,), jnp.float32)
        return jax.jit(load, donate_argnums=0).lower(slots, one, tokens, one, one, bias).compile()

    def run(self, shape: Shape, arguments: Arguments, batch: Batch) -> tuple[KVCache, Slots, Output]:
        """Dispatch one step; the cache and the slots that are passed are consumed."""
        return self.steps[shape](arguments.params, arguments.cache, arguments.slots, batch)

    def empty_batch(self, shape: Shape, empty_slot: int) -> Batch:
        """A host batch of empty rows, to be filled in."""
        B, T = shape.rows, shape.tokens
        table = np.zeros((B, self.table_width), np.int32)
        slot = np.full(B, empty_slot, np.int32)
        return Batch(np.full((B, T), -1, np.int32), np.zeros(B, np.int32), np.zeros(B, np.int32), table, slot)


Ints = np.ndarray | list[int]


def fill(batch: Batch, row: int, tokens: Ints, start: int, pages: Ints, slot: int) -> None:
    """Write one row of a host batch."""
    batch.tokens[row, : len(tokens)] = tokens
    batch.start[row], batch.count[row], batch.slot[row] = start, len(tokens), slot
    batch.page_table[row, : len(pages)] = pages

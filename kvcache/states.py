"""States of recurrent layers in pages: a page holds what a layer has kept of all tokens up to the page's end,
or up to the newest token in it.

A step reads the state behind the token before its first, and writes it into the page of its last token; a
prefill writes also where a page ends whose number its table has. So a prefix is found, evicted and moved as
pages of keys are.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..model.attention import TurningAttend
from ..model.layers import apart
from ..model.recurrent.kinds import BLOCK, Leaves
from ..model.recurrent.linear import Terms, lone_step, step
from ..model.recurrent.states import Recurrence, RecurrentInputs, RecurrentState, newest
from ..model.tree import pytree, static
from .kernels.memory import MemoryPool, StatePages, step_pages, steps_in_place
from .shards import split_heads


@pytree
class StatePool:
    """A layer's states by page: `states` are those of a RecurrentState, with pages [heads,P,...] in place of
    rows."""

    states: RecurrentState
    page_size: int = static(1)

    @property
    def pages(self) -> int:
        return jax.tree.leaves(self.states)[0].shape[1]


def state_bytes(leaves: Leaves) -> int:
    """Bytes of a layer's state: it is kept in float32."""
    return sum(4 * heads * rows * size for heads, rows, size in leaves.shapes)


def empty_states(leaves: Leaves, pages: int, page_size: int) -> StatePool:
    """A pool of zeros."""

    def zeros(shape: tuple[int, int, int]) -> Float[Array, "heads P ..."]:
        return jnp.zeros((shape[0], pages, *shape[1:]), jnp.float32)

    states = RecurrentState(tuple(map(zeros, leaves.tails)), leaves.memory and zeros(leaves.memory))
    return StatePool(states, page_size)


def states_of(own: Float[Array, "heads P ..."], page: Int[Array, " B"]) -> Float[Array, "heads B ..."]:
    head = jnp.arange(own.shape[0], dtype=jnp.int32)[:, None]
    return own[head, page[None]]


def put_states(
    own: Float[Array, "heads P ..."], page: Int[Array, " B"], new: Float[Array, "heads B ..."]
) -> Float[Array, "heads P ..."]:
    head = jnp.arange(own.shape[0], dtype=jnp.int32)[:, None]
    return own.at[head, page[None]].set(new, mode="drop", unique_indices=True)


@dataclass(frozen=True)
class StateRows:
    """Where the states of a step's rows are: tokens before each row and in it, and its page table, in which a
    negative number is no page."""

    start: Int[Array, " B"]
    count: Int[Array, " B"]
    table: Int[Array, "B M"]

    def read(self, pool: StatePool) -> RecurrentState:
        """The states before the rows' first tokens."""
        page = jnp.maximum(self._page(pool, self.start), 0)
        return jax.tree.map(lambda own: self._known(split_heads(states_of, own, (page,))), pool.states)

    @jax.named_scope("cache_write")
    def write(
        self, pool: StatePool, end: Int[Array, " B"], state: RecurrentState, wanted: Bool[Array, " B"]
    ) -> StatePool:
        """The pool with the states behind `end` tokens, of those rows whose is `wanted`."""
        place = self.target(pool, end, wanted)

        def put(own: Float[Array, "heads P ..."], new: Float[Array, "heads B ..."]) -> Any:
            return split_heads(put_states, own, (place,), new)

        return replace(pool, states=jax.tree.map(put, pool.states, state))

    def source(self, pool: StatePool) -> Int[Array, " B"]:
        """The pages of the states before the rows' first tokens; negative where there is none."""
        return jnp.where(self.start > 0, self._page(pool, self.start), -1)

    def target(self, pool: StatePool, end: Int[Array, " B"], wanted: Bool[Array, " B"]) -> Int[Array, " B"]:
        """The pages of the states behind `end` tokens, each another beyond the pool where none is written."""
        page = self._page(pool, end)
        return apart(page, wanted & (page >= 0), pool.pages)

    def stays(self, pool: StatePool, end: Int[Array, " B"]) -> Bool[Array, " B"]:
        """True if the state after `end` tokens is kept: a page ends there, or the row."""
        last = self.start + self.count
        return (end <= last) & ((end % pool.page_size == 0) | (end == last)) & (self.count > 0)

    def _page(self, pool: StatePool, end: Int[Array, " B"]) -> Int[Array, " B"]:
        """The page of the last of `end` tokens."""
        entry = jnp.maximum(end - 1, 0) // pool.page_size
        return jnp.take_along_axis(self.table, entry[:, None], axis=1, mode="clip")[:, 0]

    def _known(self, state: Float[Array, "heads B ..."]) -> Float[Array, "heads B ..."]:
        """A row without tokens before it has a state of zeros, whatever its page holds."""
        begun = (self.start > 0).reshape(1, -1, *(1,) * (state.ndim - 2))
        return jnp.where(begun, state, 0)


def taken_on(
    pool: StatePool, rows: StateRows, recurrence: Recurrence, new: RecurrentInputs
) -> tuple[StatePool, Float[Array, "B T N U"]]:
    """The pool after the rows' new tokens, and the layer's outputs."""
    if new.shape[1] == 1:
        return stepped(pool, rows, recurrence, new)

    def write(pool: StatePool, j: Int[Array, ""], state: RecurrentState) -> StatePool:
        before = rows.start + j * BLOCK
        end = rows.start + jnp.minimum((j + 1) * BLOCK, rows.count)
        return rows.write(pool, end, state, rows.stays(pool, end) & (end > before))

    return recurrence.scan(rows.read(pool), new, rows.count, write, pool)


def stepped(
    pool: StatePool, rows: StateRows, recurrence: Recurrence, new: RecurrentInputs
) -> tuple[StatePool, Float[Array, "B 1 N U"]]:
    """The same of one token a row: its memory stays where it lies, if a kernel can do that."""
    memory, wanted = pool.states.memory, rows.count > 0
    if memory is None or not steps_in_place(memory):
        state, out = recurrence.step(rows.read(pool), new)
        return rows.write(pool, rows.start + 1, state, wanted), out
    tails = replace(pool, states=RecurrentState(pool.states.tails))
    seen = recurrence.seen(rows.read(tails), new.parts)
    tails = rows.write(tails, rows.start + 1, RecurrentState(recurrence.tails(seen)), wanted)
    terms = jax.tree.map(lambda x: x[:, 0], recurrence.one(seen, new.beside))
    place = StatePages(rows.source(pool), rows.target(pool, rows.start + 1, wanted))

    def by_pages(memory: MemoryPool, terms: Terms) -> tuple[MemoryPool, Float[Array, "B N U"]]:
        own = replace(pool, states=RecurrentState((), memory))
        found, out = lone_step(rows.read(own).memory, terms)
        return rows.write(own, rows.start + 1, RecurrentState((), found), wanted).states.memory, out

    def in_place(memory: MemoryPool, terms: Terms) -> tuple[MemoryPool, Float[Array, "B N U"]]:
        return step_pages(memory, place, terms)

    memory, out = jax.lax.platform_dependent(memory, terms, cuda=in_place, default=by_pages)
    return replace(tails, states=RecurrentState(tails.states.tails, memory)), out[:, None]


# ---------------------------------------------------------------- guesses


@dataclass(frozen=True)
class StateUpdate:
    """Pending update of a layer's state by the tokens [B,T] of a verification. `seen`: inputs of each
    convolution. `terms`: of the memory, or None."""

    seen: list[Any]
    terms: Any  # Terms, None without a memory
    tokens: int  # T

    def kept(self, pool: StatePool, rows: StateRows) -> StatePool:
        """The pool after the first `rows.count` of each row's tokens, which go through the memory once more:
        to keep that behind each of them would take T times as much."""
        T = self.tokens

        def one(i: Int[Array, ""], carry: tuple[StatePool, Any]) -> tuple[StatePool, Any]:
            pool, memory = carry
            if self.terms is not None:
                memory, _ = step(memory, jax.tree.map(lambda x: x[:, i], self.terms))
            tails = (newest(x, jnp.full(len(x), i + 1, jnp.int32), T) for x in self.seen)
            end = rows.start + i + 1
            return rows.write(pool, end, RecurrentState(tuple(tails), memory), rows.stays(pool, end)), memory

        return jax.lax.fori_loop(0, T, one, (pool, rows.read(pool).memory))[0]


@dataclass(frozen=True)
class VerifyCache:
    """`attend`'s state while guesses are verified: the cache, and of each layer with a state what the tokens
    would do to it. It is written when it is known which of them were right."""

    cache: Any  # KVCache
    pending: dict[int, StateUpdate]

    def confirmed(self, rows: StateRows, count: Int[Array, " B"]) -> Any:
        """The cache with the states behind the first `count` tokens of each row, the first of which is no
        guess."""
        rows = replace(rows, count=jnp.minimum(jnp.maximum(count, 1), rows.count))
        states = list(self.cache.states)
        for layer, guess in self.pending.items():
            states[layer] = guess.kept(states[layer], rows)
        return replace(self.cache, states=tuple(states))


@dataclass(frozen=True)
class VerifyAttend:
    """`attend` for a verification, whose tokens are rows of one token each: `keys` is that for layers with
    keys. Those with a state take the tokens of each row in turn, as decode does.

    `row_of_place` [B,T] is the row of a token, `place_of_row` [rows] the other way round.
    """

    keys: Any  # Attend
    rows: StateRows
    row_of_place: Int[Array, "B T"]
    place_of_row: Int[Array, " rows"]

    def __call__(self, state: VerifyCache, *args: Any) -> tuple[VerifyCache, Float[Array, "rows 1 N U"]]:
        cache, out = self.keys(state.cache, *args)
        return VerifyCache(cache, state.pending), out

    def turns(self, state: VerifyCache, *args: Any) -> bool:
        return isinstance(self.keys, TurningAttend) and self.keys.turns(state.cache, *args)

    def turned(self, state: VerifyCache, *args: Any) -> tuple[VerifyCache, Float[Array, "rows 1 N U"]]:
        cache, out = self.keys.turned(state.cache, *args)
        return VerifyCache(cache, state.pending), out

    def recur(
        self, state: VerifyCache, layer: int, recurrence: Recurrence, new: RecurrentInputs
    ) -> tuple[VerifyCache, Float[Array, "rows 1 N U"]]:
        before, T = self.rows.read(state.cache.states[layer]), self.row_of_place.shape[1]
        seen = recurrence.seen(before, self._by_place(new.parts))
        spans = [own.weight.shape[-1] for own in recurrence.convolutions]
        found = recurrence.one(list(map(self._spanned, seen, spans)), new.beside)
        if not isinstance(found, Terms):
            return VerifyCache(state.cache, state.pending | {layer: StateUpdate(seen, None, T)}), found
        terms = self._by_place(found)
        _, out = jax.lax.scan(step, before.memory, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), terms))
        out = jnp.moveaxis(out, 1, 0).reshape(-1, 1, *out.shape[2:])
        pending = state.pending | {layer: StateUpdate(seen, terms, T)}
        return VerifyCache(state.cache, pending), out.at[self.place_of_row].get(mode="clip")

    def _by_place(self, x: Any) -> Any:
        """Rows of one token [rows,1,...] as [B,T,...]."""
        return jax.tree.map(lambda own: own[self.row_of_place, 0], x)

    def _spanned(self, seen: Float[Array, "B seen ..."], span: int) -> Float[Array, "rows span ..."]:
        """Inputs of a convolution for each row of one token."""
        B, T = self.row_of_place.shape
        row, place = jnp.minimum(self.place_of_row // T, B - 1), self.place_of_row % T
        return seen[row[:, None], place[:, None] + jnp.arange(span, dtype=jnp.int32)[None]]

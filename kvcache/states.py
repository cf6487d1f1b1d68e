"""States of recurrent layers in pages. A page holds the state after the last token of the page, or after the
newest token in it.

A step reads the state before its first token, and writes the state after its last token. A prefill also
writes a state at the end of each page that its table has. So a prefix is found, evicted and moved like pages
of keys.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..model.attention import FusedRopeAttend
from ..model.layers import index_or_drop
from ..model.recurrent.kinds import STATE_BLOCK_TOKENS, StateShapes
from ..model.recurrent.linear import Terms, step_recurrence, step_unfused
from ..model.recurrent.states import Recurrence, RecurrentInputs, RecurrentState, slice_tail
from ..model.tree import pytree, static
from .kernels.recurrent_step import MemoryPool, StatePages, can_step_in_place, step_pages
from .shards import apply_to_local_heads


@pytree
class StatePool:
    """Pool of one layer's states. `states` is a RecurrentState whose arrays have pages [heads,P,...] in place
    of rows.

    page_size: tokens of a page
    """

    states: RecurrentState
    page_size: int = static(1)

    @property
    def num_pages(self) -> int:
        """Number of pages."""
        return jax.tree.leaves(self.states)[0].shape[1]


def state_bytes(leaves: StateShapes) -> int:
    """Return the bytes of a layer's state, which is kept in float32."""
    return sum(4 * heads * rows * size for heads, rows, size in leaves.shapes)


def empty_states(leaves: StateShapes, pages: int, page_size: int) -> StatePool:
    """Make a pool of zeros with `pages` pages of `page_size` tokens each."""

    def zeros(shape: tuple[int, int, int]) -> Float[Array, "heads P ..."]:
        return jnp.zeros((shape[0], pages, *shape[1:]), jnp.float32)

    states = RecurrentState(tuple(map(zeros, leaves.tails)), leaves.memory and zeros(leaves.memory))
    return StatePool(states, page_size)


def gather_states(array: Float[Array, "heads P ..."], page: Int[Array, " B"]) -> Float[Array, "heads B ..."]:
    """Read the states of one page per row from a pool's array."""
    head = jnp.arange(array.shape[0], dtype=jnp.int32)[:, None]
    return array[head, page[None]]


def scatter_states(
    array: Float[Array, "heads P ..."], page: Int[Array, " B"], new: Float[Array, "heads B ..."]
) -> Float[Array, "heads P ..."]:
    """Write one state per row to its page in a pool's array. A page number past the pool drops its state."""
    head = jnp.arange(array.shape[0], dtype=jnp.int32)[:, None]
    return array.at[head, page[None]].set(new, mode="drop", unique_indices=True)


@dataclass(frozen=True)
class StateRows:
    """Pages in which a step's rows have their states.

    start: tokens before each row's first
    count: tokens of each row in this step
    table: page numbers of each row; negative if there is no page
    """

    start: Int[Array, " B"]
    count: Int[Array, " B"]
    table: Int[Array, "B M"]

    def read(self, pool: StatePool) -> RecurrentState:
        """Return the states before the rows' first tokens."""
        page = jnp.maximum(self._page_at(pool, self.start), 0)
        return jax.tree.map(
            lambda array: self._zero_new_rows(apply_to_local_heads(gather_states, array, (page,))),
            pool.states,
        )

    @jax.named_scope("write_states")
    def write(
        self, pool: StatePool, end: Int[Array, " B"], state: RecurrentState, wanted: Bool[Array, " B"]
    ) -> StatePool:
        """Return the pool with the states after `end` tokens written, for the rows that are `wanted`."""
        page = self.target_pages(pool, end, wanted)

        def put_array(array: Float[Array, "heads P ..."], new: Float[Array, "heads B ..."]) -> Any:
            return apply_to_local_heads(scatter_states, array, (page,), new)

        return replace(pool, states=jax.tree.map(put_array, pool.states, state))

    def source_pages(self, pool: StatePool) -> Int[Array, " B"]:
        """Return the pages of the states before the rows' first tokens; negative where there is none."""
        return jnp.where(self.start > 0, self._page_at(pool, self.start), -1)

    def target_pages(
        self, pool: StatePool, end: Int[Array, " B"], wanted: Bool[Array, " B"]
    ) -> Int[Array, " B"]:
        """Return the pages of the states after `end` tokens. A row that writes nothing gets a page past the
        pool, distinct for each row (unique indices)."""
        page = self._page_at(pool, end)
        return index_or_drop(page, wanted & (page >= 0), pool.num_pages)

    def needs_write(self, pool: StatePool, end: Int[Array, " B"]) -> Bool[Array, " B"]:
        """True if the state after `end` tokens is written: a page or the row ends there."""
        last = self.start + self.count
        return (end <= last) & ((end % pool.page_size == 0) | (end == last)) & (self.count > 0)

    def _page_at(self, pool: StatePool, end: Int[Array, " B"]) -> Int[Array, " B"]:
        """Return the page of the last of `end` tokens."""
        entry = jnp.maximum(end - 1, 0) // pool.page_size
        return jnp.take_along_axis(self.table, entry[:, None], axis=1, mode="clip")[:, 0]

    def _zero_new_rows(self, state: Float[Array, "heads B ..."]) -> Float[Array, "heads B ..."]:
        """Replace the state of each row without earlier tokens by zeros, whatever its page holds."""
        has_tokens = (self.start > 0).reshape(1, -1, *(1,) * (state.ndim - 2))
        return jnp.where(has_tokens, state, 0)


def advance_states(
    pool: StatePool, rows: StateRows, recurrence: Recurrence, inputs: RecurrentInputs
) -> tuple[StatePool, Float[Array, "B T N U"]]:
    """Advance the recurrent states by the rows' new tokens. Returns the pool and the layer's outputs."""
    if inputs.shape[1] == 1:
        return step_states(pool, rows, recurrence, inputs)

    def write_block(pool: StatePool, j: Int[Array, ""], state: RecurrentState) -> StatePool:
        """Write the states after block j of the new tokens, for the rows that reach into it."""
        before = rows.start + j * STATE_BLOCK_TOKENS
        end = rows.start + jnp.minimum((j + 1) * STATE_BLOCK_TOKENS, rows.count)
        return rows.write(pool, end, state, rows.needs_write(pool, end) & (end > before))

    return recurrence.scan(rows.read(pool), inputs, rows.count, write_block, pool)


def step_states(
    pool: StatePool, rows: StateRows, recurrence: Recurrence, inputs: RecurrentInputs
) -> tuple[StatePool, Float[Array, "B 1 N U"]]:
    """Advance the recurrent states by one token per row. A kernel on a GPU updates them in place in the pool.
    Elsewhere they are read, stepped and written back."""
    memory, wanted = pool.states.memory, rows.count > 0
    if memory is None or not can_step_in_place(memory):
        state, out = recurrence.step(rows.read(pool), inputs)
        return rows.write(pool, rows.start + 1, state, wanted), out
    tails = replace(pool, states=RecurrentState(pool.states.tails))
    conv_inputs = recurrence.conv_windows(rows.read(tails), inputs.conv_inputs)
    tails = rows.write(tails, rows.start + 1, RecurrentState(recurrence.next_tails(conv_inputs)), wanted)
    terms = jax.tree.map(lambda x: x[:, 0], recurrence.step_terms(conv_inputs, inputs.extras))
    pages = StatePages(rows.source_pages(pool), rows.target_pages(pool, rows.start + 1, wanted))

    def step_copies(memory: MemoryPool, terms: Terms) -> tuple[MemoryPool, Float[Array, "B N U"]]:
        """Read the memory of each row, step it, and write it back."""
        memory_pool = replace(pool, states=RecurrentState((), memory))
        new_memory, out = step_unfused(rows.read(memory_pool).memory, terms)
        return rows.write(
            memory_pool, rows.start + 1, RecurrentState((), new_memory), wanted
        ).states.memory, out

    def step_in_place(memory: MemoryPool, terms: Terms) -> tuple[MemoryPool, Float[Array, "B N U"]]:
        """Step the memory of each row in the pool, by the kernel."""
        return step_pages(memory, pages, terms)

    memory, out = jax.lax.platform_dependent(memory, terms, cuda=step_in_place, default=step_copies)
    return replace(tails, states=RecurrentState(tails.states.tails, memory)), out[:, None]


# ---------------------------------------------------------------- draft tokens


@dataclass(frozen=True)
class StateUpdate:
    """Pending update of one layer's state by the tokens [B,T] of a verification.

    conv_inputs: inputs of each convolution
    terms: inputs of the memory's steps, or None
    num_tokens: number of tokens of a row
    """

    conv_inputs: list[Any]
    terms: Any  # Terms, None without a memory
    num_tokens: int  # T

    def commit(self, pool: StatePool, rows: StateRows) -> StatePool:
        """Commit the first `rows.count` tokens of each row to the pool. The tokens are replayed, because
        storing the state after every token would take T times the memory."""
        T = self.num_tokens

        def commit_token(i: Int[Array, ""], carry: tuple[StatePool, Any]) -> tuple[StatePool, Any]:
            pool, memory = carry
            if self.terms is not None:
                memory, _ = step_recurrence(memory, jax.tree.map(lambda x: x[:, i], self.terms))
            tails = (slice_tail(x, jnp.full(len(x), i + 1, jnp.int32), T) for x in self.conv_inputs)
            end = rows.start + i + 1
            return rows.write(
                pool, end, RecurrentState(tuple(tails), memory), rows.needs_write(pool, end)
            ), memory

        return jax.lax.fori_loop(0, T, commit_token, (pool, rows.read(pool).memory))[0]


@dataclass(frozen=True)
class VerifyCache:
    """State of `attend` while draft tokens are verified. Recurrent states are written once the accepted
    tokens are known.

    cache: the KVCache
    pending: update of each recurrent layer, by the layer's number
    """

    cache: Any  # KVCache
    pending: dict[int, StateUpdate]

    def commit(self, rows: StateRows, count: Int[Array, " B"]) -> Any:
        """Return the cache with the states after the first `count` tokens of each row. The first token is no
        draft token, so at least one is committed."""
        rows = replace(rows, count=jnp.minimum(jnp.maximum(count, 1), rows.count))
        states = list(self.cache.states)
        for layer, update in self.pending.items():
            states[layer] = update.commit(states[layer], rows)
        return replace(self.cache, states=tuple(states))


@dataclass(frozen=True)
class VerifyAttend:
    """`attend` for a verification, in which each token is a batch row. Recurrent layers take the tokens of
    each sequence one after the other, as decode does.

    key_attend: the `attend` of layers with keys
    state_rows: pages of the sequences' states
    row_by_token: batch row of each token [B,T]
    token_by_row: token (b*T + t) of each batch row [rows]
    """

    key_attend: Any  # Attend
    state_rows: StateRows
    row_by_token: Int[Array, "B T"]
    token_by_row: Int[Array, " rows"]

    def __call__(
        self, verify_cache: VerifyCache, *args: Any
    ) -> tuple[VerifyCache, Float[Array, "rows 1 N U"]]:
        cache, out = self.key_attend(verify_cache.cache, *args)
        return VerifyCache(cache, verify_cache.pending), out

    def can_fuse_rope(self, verify_cache: VerifyCache, *args: Any) -> bool:
        """True if the attend of layers with keys can norm, rotate and write heads like these."""
        return isinstance(self.key_attend, FusedRopeAttend) and self.key_attend.can_fuse_rope(
            verify_cache.cache, *args
        )

    def attend_with_rope(
        self, verify_cache: VerifyCache, *args: Any
    ) -> tuple[VerifyCache, Float[Array, "rows 1 N U"]]:
        """Norm, rotate and write new heads, and attend. Returns the cache and the outputs."""
        cache, out = self.key_attend.attend_with_rope(verify_cache.cache, *args)
        return VerifyCache(cache, verify_cache.pending), out

    def run_recurrence(
        self, verify_cache: VerifyCache, layer: int, recurrence: Recurrence, inputs: RecurrentInputs
    ) -> tuple[VerifyCache, Float[Array, "rows 1 N U"]]:
        """Compute a recurrent layer's outputs after each token. The states' update stays pending."""
        before, T = self.state_rows.read(verify_cache.cache.states[layer]), self.row_by_token.shape[1]
        conv_inputs = recurrence.conv_windows(before, self._to_token_grid(inputs.conv_inputs))
        spans = [convolution.weight.shape[-1] for convolution in recurrence.convolutions]
        outputs = recurrence.step_terms(list(map(self._conv_windows, conv_inputs, spans)), inputs.extras)
        if not isinstance(outputs, Terms):
            return VerifyCache(
                verify_cache.cache, verify_cache.pending | {layer: StateUpdate(conv_inputs, None, T)}
            ), outputs
        terms = self._to_token_grid(outputs)
        _, out = jax.lax.scan(
            step_recurrence, before.memory, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), terms)
        )
        out = jnp.moveaxis(out, 1, 0).reshape(-1, 1, *out.shape[2:])
        pending = verify_cache.pending | {layer: StateUpdate(conv_inputs, terms, T)}
        return VerifyCache(verify_cache.cache, pending), out.at[self.token_by_row].get(mode="clip")

    def _to_token_grid(self, x: Any) -> Any:
        """Reorder batch rows of one token [rows,1,...] to [B,T,...]."""
        return jax.tree.map(lambda array: array[self.row_by_token, 0], x)

    def _conv_windows(
        self, conv_inputs: Float[Array, "B seen ..."], span: int
    ) -> Float[Array, "rows span ..."]:
        """Return the `span` inputs of a convolution for each batch row of one token."""
        B, T = self.row_by_token.shape
        row, token = jnp.minimum(self.token_by_row // T, B - 1), self.token_by_row % T
        return conv_inputs[row[:, None], token[:, None] + jnp.arange(span, dtype=jnp.int32)[None]]

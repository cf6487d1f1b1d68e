"""Sparse attention: select each query's keys before attention reads any (DeepSeek-V3.2's lightning indexer).

All keys are scored, block by block. Then bisection of the scores' range finds the bounds of the best keys. It
uses only comparisons and integers. So a selection depends neither on the width of the page table nor on the
other rows. If every query may see all its keys, nothing is scored.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..model.attention import KeyPredicate, Selection, TopKBounds, key_positions

MAX_COUNTED_BLOCKS = 16  # blocks that are counted at once, at most
IndexReader = Callable[[Int[Array, " rows"], Int[Array, " rows"]], Float[Array, "1 rows S size"]]


class SelectedKeys(NamedTuple):
    """Keys that the rows' queries select: the order of all keys, and the bounds of the selected ones."""

    selection: Selection
    pos: Any  # int32 [B,T]
    order: Any  # uint32 [B,T,places]
    bounds: TopKBounds  # [B,T]

    def sees(self, rows: Int[Array, " rows"], j: Int[Array, ""], S: int) -> Bool[Array, "rows T S"]:
        """True where queries of some rows select the keys of block j. S is the number of keys in a block."""
        order = jax.lax.dynamic_slice_in_dim(self.order, j * S, S, axis=2)[rows]
        bounds = TopKBounds(self.bounds.lowest_order[rows], self.bounds.last_position[rows])
        return (
            bounds.contains(order, key_positions(S, j * S))
            | (self.pos[rows] < self.selection.top_k)[..., None]
        )


def select_top_keys(
    selection: Selection,
    pos: Int[Array, "B T"],
    end: Int[Array, " B"],
    num_positions: int,
    read_index: IndexReader,
) -> SelectedKeys:
    """Select keys for queries at positions `pos` of rows that end at position `end`. `num_positions` is the
    most positions of a row. `read_index(rows, j)` returns the indexer's keys of block j of some rows."""
    rows = jnp.arange(len(end), dtype=jnp.int32)
    S = jax.eval_shape(read_index, rows, rows).shape[2]
    size = S * min(MAX_COUNTED_BLOCKS, -(-num_positions // S))
    num_positions, last = -(-num_positions // size) * size, jnp.max(end)
    nothing = jnp.zeros((*pos.shape, num_positions), jnp.uint32)

    def score_block(j: Int[Array, ""], order: Any) -> Any:
        """Score the keys of block j for all queries, and put their order into `order`."""
        new = selection.sortable_scores(read_index(rows, jnp.broadcast_to(j, rows.shape))[0])
        is_visible = key_positions(S, j * S) <= pos[..., None].astype(jnp.uint32)
        new = jnp.where(is_visible, new, jnp.uint32(0))
        return jax.lax.dynamic_update_slice_in_dim(order, new, j * S, axis=2)

    def search_bounds() -> tuple[Any, TopKBounds]:
        """Score all keys, and return their order and the bounds of the selected ones."""
        order = jax.lax.fori_loop(0, (last + S - 1) // S, score_block, nothing)

        def count(holds: KeyPredicate) -> Int[Array, "B T"]:
            """Count for each query the keys for which a predicate holds."""

            def count_part(i: Int[Array, ""], total: Any) -> Any:
                part_order = jax.lax.dynamic_slice_in_dim(order, i * size, size, axis=2)
                return total + holds(part_order, key_positions(size, i * size)).sum(-1, dtype=jnp.int32)

            return jax.lax.fori_loop(
                0, (last + size - 1) // size, count_part, jnp.zeros(pos.shape, jnp.int32)
            )

        return order, selection.find_bounds(num_positions, count)

    def keep_all_keys() -> tuple[Any, TopKBounds]:
        """Return bounds that select every key."""
        zero = jnp.zeros(pos.shape, jnp.uint32)
        return nothing, TopKBounds(zero, zero)

    return SelectedKeys(selection, pos, *jax.lax.cond(last > selection.top_k, search_bounds, keep_all_keys))

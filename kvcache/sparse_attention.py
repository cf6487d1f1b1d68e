"""Sparse attention: select each query's keys before attention reads any (DeepSeek-V3.2's lightning indexer).

All keys are scored, block by block; then the bounds of the best are found by bisection of the scores' range,
with comparisons and whole numbers only. So a selection depends neither on the width of the page table nor on
the rows beside it. Where every query may see all its keys nothing is scored.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..model.attention import Holds, Selection, TopKBounds, places_of

COUNTED = 16  # blocks that are counted at once at most
Index = Callable[[Int[Array, " rows"], Int[Array, " rows"]], Float[Array, "1 rows S size"]]


class SelectedKeys(NamedTuple):
    """Selection of the rows' queries: the order of all keys, and the bounds of the selected ones."""

    selection: Selection
    pos: Any  # int32 [B,T]
    order: Any  # uint32 [B,T,places]
    bounds: TopKBounds  # of [B,T]

    def sees(self, rows: Int[Array, " rows"], j: Int[Array, ""], S: int) -> Bool[Array, "rows T S"]:
        """True where queries of some rows see the keys of block j, if these lie before them."""
        order = jax.lax.dynamic_slice_in_dim(self.order, j * S, S, axis=2)[rows]
        bounds = TopKBounds(self.bounds.least[rows], self.bounds.last[rows])
        return bounds.hold(order, places_of(S, j * S)) | (self.pos[rows] < self.selection.keys)[..., None]


def choose(
    selection: Selection, pos: Int[Array, "B T"], end: Int[Array, " B"], places: int, index: Index
) -> SelectedKeys:
    """Select keys for queries at positions `pos` of rows that end at `end`, among at most `places` positions.
    `index(rows, j)` reads the indexer's keys of block j of some rows."""
    rows = jnp.arange(len(end), dtype=jnp.int32)
    S = jax.eval_shape(index, rows, rows).shape[2]
    size = S * min(COUNTED, -(-places // S))
    places, last = -(-places // size) * size, jnp.max(end)
    nothing = jnp.zeros((*pos.shape, places), jnp.uint32)

    def scored(j: Int[Array, ""], order: Any) -> Any:
        new = selection.order(index(rows, jnp.broadcast_to(j, rows.shape))[0])
        seen = places_of(S, j * S) <= pos[..., None].astype(jnp.uint32)
        new = jnp.where(seen, new, jnp.uint32(0))
        return jax.lax.dynamic_update_slice_in_dim(order, new, j * S, axis=2)

    def bounded() -> tuple[Any, TopKBounds]:
        order = jax.lax.fori_loop(0, (last + S - 1) // S, scored, nothing)

        def count(holds: Holds) -> Int[Array, "B T"]:
            def part(i: Int[Array, ""], total: Any) -> Any:
                own = jax.lax.dynamic_slice_in_dim(order, i * size, size, axis=2)
                return total + holds(own, places_of(size, i * size)).sum(-1, dtype=jnp.int32)

            return jax.lax.fori_loop(0, (last + size - 1) // size, part, jnp.zeros(pos.shape, jnp.int32))

        return order, selection.bounds(places, count)

    def unbounded() -> tuple[Any, TopKBounds]:
        zero = jnp.zeros(pos.shape, jnp.uint32)
        return nothing, TopKBounds(zero, zero)

    return SelectedKeys(selection, pos, *jax.lax.cond(last > selection.keys, bounded, unbounded))

"""Attention for trees of guesses: nodes share a row's pages and differ in their newest tokens; one path will
be kept.

The keys of a tree's nodes are not written: each node reads its row's pages with the new keys of its own path
laid over them, at the places where decode would have written them. So a node's bits are decode's, whatever
its tree; when one path is accepted its keys are written once, and the rest need no undo.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..model.attention import Attend, AttentionParams, Keys, NewHeads, Values
from ..model.config import NormKind
from ..model.tree import pytree
from .kernels.attention import attend_with
from .kernels.tiles import LayerPages
from .paged import turned, turns
from .pages import (
    BLOCK,
    Batch,
    Block,
    KVCache,
    Pool,
    as_pooled,
    choice,
    in_lanes,
    made_of,
    read_block,
    running_softmax,
    stored,
    with_layer,
)
from .quantised import decoded, read_back


@pytree
class Branches:
    """`attend`'s state: the cache as it was, and every node's new keys and values, by layer [B,n,K,H]."""

    cache: KVCache
    k: tuple[Any, ...]
    v: tuple[Any, ...]


def branches(cache: KVCache) -> Branches:
    nothing = (None,) * len(cache.k)
    return Branches(cache, nothing, nothing)


class Nodes(NamedTuple):
    """Rows [B*n] that are the n nodes of each row's tree: the root's position, and each node's depth.

    `path` [n,path] has the nodes from the root to each node, padded with any node.
    """

    path: np.ndarray
    root: Int[Array, " rows"]
    depth: Int[Array, " rows"]

    def paths(self, new: Float[Array, "B n K H"]) -> Float[Array, "B*n path K H"]:
        """New keys of each node's own path."""
        return new[:, self.path].reshape(-1, self.path.shape[1], *new.shape[2:])

    def laid_over(
        self,
        block: Float[Array, "K rows S H"],
        own_path: Float[Array, "rows path K H"],
        rows: Int[Array, " rows"],
        j: Int[Array, " rows"],
    ) -> Float[Array, "K rows S H"]:
        """Block j of some rows, with their own paths' keys where they would be."""
        at = j[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)[None]
        place = at - self.root[rows, None]
        own = (place >= 0) & (place <= self.depth[rows, None])
        index = jnp.clip(place, 0, self.path.shape[1] - 1)[:, :, None, None]
        laid = jnp.take_along_axis(own_path, index, axis=1).transpose(2, 0, 1, 3)
        return jnp.where(own[None, :, :, None], laid, block)


@dataclass(frozen=True)
class BranchAttend:
    """`attend` for rows that are nodes of trees: it writes nothing."""

    batch: Batch
    windows: tuple[int | None, ...]
    nodes: Nodes

    def __call__(
        self,
        state: Branches,
        layer: int,
        q: Float[Array, "B T N _"],
        k: Keys | None,
        v: Values | None,
        reading: AttentionParams,
    ) -> tuple[Branches, Float[Array, "B T N U"]]:
        table = self.batch.page_tables[self.windows.index(reading.window)]
        pools, n = (state.cache.k[layer], state.cache.v[layer]), len(self.nodes.path)
        if k is None:
            k, v = state.k[layer], state.v[layer]
        else:  # heads lie as in their pool
            new_ones = zip(pools, (k, v), strict=True)
            k, v = (
                None if new is None else as_pooled(pool, new.reshape(-1, n, *new.shape[2:]))
                for pool, new in new_ones
            )
        each = zip(pools, (k, v), strict=True)
        tails: Any = tuple(
            new if new is None else self.nodes.paths(read_back(pool, new)) for pool, new in each
        )

        def laid_over(
            pool: Pool,
            tail: Float[Array, "nodes path K H"],
            rows: Int[Array, " rows"],
            j: Int[Array, " rows"],
        ) -> Float[Array, "K rows S H"]:
            return self.nodes.laid_over(read_block(pool, table[rows], j, tail.dtype), tail[rows], rows, j)

        def read_values(rows: Int[Array, " rows"], j: Int[Array, " rows"]) -> Float[Array, "K rows S values"]:
            assert pools[1] is not None
            return laid_over(pools[1], tails[1], rows, j)

        def read(rows: Int[Array, " rows"], j: Int[Array, " rows"]) -> Block:
            keys = laid_over(pools[0], tails[0], rows, j)
            if reading.expand is None:
                return keys, read_values(rows, j)
            return made_of(keys, rows, reading.expand)

        chosen = choice(reading, self.batch, table, pools[0].shape[2], read_values)
        by_blocks = partial(running_softmax, batch=self.batch, read=read, reading=reading, chosen=chosen)
        if not reading.makes_keys:
            by_blocks = partial(in_lanes, by_blocks, pool=pools[0], heads=reading.heads)
        pages = LayerPages(*pools, table, self.batch.start, self.batch.count, (*tails, self.nodes.root))
        out = attend_with(q, pages, reading, by_blocks, state.cache.isa)
        return Branches(state.cache, with_layer(state.k, layer, k), with_layer(state.v, layer, v)), out

    def turns(self, state: Branches, layer: int, q: Float[Array, "B T N H"], norm: NormKind | None) -> bool:
        """True if a kernel norms and turns heads like these, as it does for decode."""
        return turns(q, (state.cache.k[layer], state.cache.v[layer]), norm, state.cache.isa)

    def turned(
        self, state: Branches, layer: int, new: NewHeads, reading: AttentionParams
    ) -> tuple[Branches, Float[Array, "B T N U"]]:
        rows = jnp.arange(len(new.q), dtype=jnp.int32)[:, None]
        # pages of one token each, in which the keys and values are left for a moment
        pools = state.cache.k[layer], state.cache.v[layer]
        k, v = (jnp.zeros((pool.shape[0], len(rows), 1, pool.shape[-1]), pool.dtype) for pool in pools)
        made: Any = turned(new, (k, v), (rows, 0 * rows), state.cache.isa)
        q, (k, v) = made
        k, v = (decoded(x, q.dtype).transpose(1, 2, 0, 3) for x in (k, v))
        return self(state, layer, q, k, v, reading)


def branching(
    batch: Batch,
    windows: tuple[int | None, ...],
    path: Int[np.ndarray, "n path"],
    depths: Int[np.ndarray, " n"],
) -> Attend:
    """`attend` for rows [B*n,1] that are the n nodes of each row's tree.

    `path` has the nodes from the root to each node (padded with any node), `depths` how many lie before it;
    a node stands at the position `depths` behind the root, which is where its row of the batch starts.
    """
    n = len(depths)
    depth = jnp.tile(jnp.asarray(depths, jnp.int32), batch.start.shape[0] // n)
    nodes = Nodes(path, batch.start - depth, depth)
    return BranchAttend(batch, windows, nodes)


def keep(
    state: Branches,
    batch: Batch,
    windows: tuple[int | None, ...],
    layers: tuple[int | None, ...],
    taken: Int[Array, "B T"],
) -> KVCache:
    """The cache with the keys of the nodes that were taken of each row's tree, in order; the batch says where
    and how many.

    `layers` are the layers' windows.
    """

    def pool(layer: int, window: int | None) -> tuple[Any, Any]:
        def path(x: Float[Array, "B n K H"]) -> Float[Array, "B T K H"]:
            return jnp.take_along_axis(x, taken[:, :, None, None], axis=1)

        pools = (state.cache.k[layer], state.cache.v[layer])
        table = batch.page_tables[windows.index(window)]
        k, v = state.k[layer], state.v[layer]
        if k is None:
            return pools
        return stored(pools, batch, table, path(k), None if v is None else path(v))

    found = [pool(layer, window) for layer, window in enumerate(layers)]
    return replace(state.cache, k=tuple(k for k, _ in found), v=tuple(v for _, v in found))

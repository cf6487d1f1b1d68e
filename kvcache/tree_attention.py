"""Attention for trees of draft tokens. The nodes of a tree share a row's pages and differ in their newest
tokens. At most one path is accepted.

The keys of a tree's nodes are not written. Each node reads its row's pages, overlaid with the new keys of its
own path at the positions where decode would write them. So a node's bits are those of decode, whatever its
tree. When a path is accepted, its keys are written once, and the rest need no undo.
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
from .kernels.attention import attend_with_kernels
from .kernels.tiles import LayerPages
from .paged_attention import apply_rope_and_write, has_rope_kernel
from .pages import (
    KEYS_PER_BLOCK,
    Batch,
    KVBlock,
    KVCache,
    Pool,
    attend_key_blocks,
    attend_packed_heads,
    expand_latent,
    read_block,
    select_sparse_keys,
    to_pool_layout,
    with_layer_pool,
    write_kv,
)
from .quantised import dequantise_heads, round_to_pool


@pytree
class Branches:
    """State of `attend` for trees.

    cache: the unchanged KVCache
    k, v: new keys and values of every node, by layer [B,n,K,H]; None before the layer ran
    """

    cache: KVCache
    k: tuple[Any, ...]
    v: tuple[Any, ...]


def initial_branches(cache: KVCache) -> Branches:
    """Return the state before the first layer: the cache, and no new keys."""
    nothing = (None,) * len(cache.k)
    return Branches(cache, nothing, nothing)


class Nodes(NamedTuple):
    """Batch rows [B*n] that are the n nodes of each row's tree.

    path: nodes from the root to each node [n,path], padded with any node
    root: position of the row's root
    depth: depth of the node
    """

    path: np.ndarray
    root: Int[Array, " rows"]
    depth: Int[Array, " rows"]

    def path_heads(self, new: Float[Array, "B n K H"]) -> Float[Array, "B*n path K H"]:
        """Return for each node the new keys of its path from the root."""
        return new[:, self.path].reshape(-1, self.path.shape[1], *new.shape[2:])

    def overlay_path(
        self,
        block: Float[Array, "K rows S H"],
        own_path: Float[Array, "rows path K H"],
        rows: Int[Array, " rows"],
        j: Int[Array, " rows"],
    ) -> Float[Array, "K rows S H"]:
        """Overlay block j of some rows with the keys of their nodes' own paths, at these keys' positions."""
        positions = j[:, None] * KEYS_PER_BLOCK + jnp.arange(KEYS_PER_BLOCK, dtype=jnp.int32)[None]
        step = positions - self.root[rows, None]
        is_on_path = (step >= 0) & (step <= self.depth[rows, None])
        index = jnp.clip(step, 0, self.path.shape[1] - 1)[:, :, None, None]
        path_keys = jnp.take_along_axis(own_path, index, axis=1).transpose(2, 0, 1, 3)
        return jnp.where(is_on_path[None, :, :, None], path_keys, block)


@dataclass(frozen=True)
class BranchAttend:
    """`attend` for batch rows that are nodes of trees. It writes nothing to the cache.

    windows: window of each page table, in tokens; None is unlimited, STATE_WINDOW is for recurrent layers
    """

    batch: Batch
    windows: tuple[int | None, ...]
    nodes: Nodes

    def __call__(
        self,
        branches: Branches,
        layer: int,
        q: Float[Array, "B T N _"],
        k: Keys | None,
        v: Values | None,
        attention: AttentionParams,
    ) -> tuple[Branches, Float[Array, "B T N U"]]:
        table = self.batch.page_tables[self.windows.index(attention.window)]
        pools, n = (branches.cache.k[layer], branches.cache.v[layer]), len(self.nodes.path)
        if k is None:
            k, v = branches.k[layer], branches.v[layer]
        else:  # in their pool's layout
            new_ones = zip(pools, (k, v), strict=True)
            k, v = (
                None if new is None else to_pool_layout(pool, new.reshape(-1, n, *new.shape[2:]))
                for pool, new in new_ones
            )
        pairs = zip(pools, (k, v), strict=True)
        tails: Any = tuple(
            new if new is None else self.nodes.path_heads(round_to_pool(pool, new)) for pool, new in pairs
        )

        def read_overlaid(
            pool: Pool,
            tail: Float[Array, "nodes path K H"],
            rows: Int[Array, " rows"],
            j: Int[Array, " rows"],
        ) -> Float[Array, "K rows S H"]:
            return self.nodes.overlay_path(read_block(pool, table[rows], j, tail.dtype), tail[rows], rows, j)

        def read_values(rows: Int[Array, " rows"], j: Int[Array, " rows"]) -> Float[Array, "K rows S values"]:
            assert pools[1] is not None
            return read_overlaid(pools[1], tails[1], rows, j)

        def read_kv_block(rows: Int[Array, " rows"], j: Int[Array, " rows"]) -> KVBlock:
            keys = read_overlaid(pools[0], tails[0], rows, j)
            if attention.expand is None:
                return keys, read_values(rows, j)
            return expand_latent(keys, rows, attention.expand)

        selected_keys = select_sparse_keys(attention, self.batch, table, pools[0].shape[2], read_values)
        attend_blocks = partial(
            attend_key_blocks,
            batch=self.batch,
            read=read_kv_block,
            attention=attention,
            selected_keys=selected_keys,
        )
        if not attention.has_expanded_keys:
            attend_blocks = partial(
                attend_packed_heads, attend_blocks, pool=pools[0], heads=attention.num_kv_heads
            )
        pages = LayerPages(*pools, table, self.batch.start, self.batch.count, (*tails, self.nodes.root))
        out = attend_with_kernels(q, pages, attention, attend_blocks, branches.cache.isa)
        return Branches(
            branches.cache, with_layer_pool(branches.k, layer, k), with_layer_pool(branches.v, layer, v)
        ), out

    def can_fuse_rope(
        self, branches: Branches, layer: int, q: Float[Array, "B T N H"], norm: NormKind | None
    ) -> bool:
        """True if a kernel norms and rotates heads like these, as it does for decode."""
        return has_rope_kernel(
            q, (branches.cache.k[layer], branches.cache.v[layer]), norm, branches.cache.isa
        )

    def attend_with_rope(
        self, branches: Branches, layer: int, new_heads: NewHeads, attention: AttentionParams
    ) -> tuple[Branches, Float[Array, "B T N U"]]:
        """Norm and rotate new heads with the kernel of decode, and attend. Scratch pools of one token per
        page take the keys and values that it writes."""
        rows = jnp.arange(len(new_heads.q), dtype=jnp.int32)[:, None]
        # scratch pools with one token per page, to which the kernel writes the keys and values
        pools = branches.cache.k[layer], branches.cache.v[layer]
        k, v = (jnp.zeros((pool.shape[0], len(rows), 1, pool.shape[-1]), pool.dtype) for pool in pools)
        roped: Any = apply_rope_and_write(new_heads, (k, v), (rows, 0 * rows), branches.cache.isa)
        q, (k, v) = roped
        k, v = (dequantise_heads(x, q.dtype).transpose(1, 2, 0, 3) for x in (k, v))
        return self(branches, layer, q, k, v, attention)


def make_branch_attend(
    batch: Batch,
    windows: tuple[int | None, ...],
    path: Int[np.ndarray, "n path"],
    depths: Int[np.ndarray, " n"],
) -> Attend:
    """Return the `attend` for batch rows [B*n,1] that are the n nodes of each row's tree.

    `path` has the nodes from the root to each node, padded with any node. `depths` is the number of nodes
    before each one. A node's batch row starts at the root's position plus its depth.
    """
    n = len(depths)
    depth = jnp.tile(jnp.asarray(depths, jnp.int32), batch.start.shape[0] // n)
    nodes = Nodes(path, batch.start - depth, depth)
    return BranchAttend(batch, windows, nodes)


def commit_branches(
    branches: Branches,
    batch: Batch,
    windows: tuple[int | None, ...],
    layer_windows: tuple[int | None, ...],
    accepted: Int[Array, "B T"],
) -> KVCache:
    """Write the keys of the accepted nodes of each row's tree, in order, and return the cache. The batch has
    their positions and their number. `layer_windows` is the window of each layer."""

    def commit_layer(layer: int, window: int | None) -> tuple[Any, Any]:
        """Write the accepted keys and values of one layer, and return its pools."""

        def accepted_heads(x: Float[Array, "B n K H"]) -> Float[Array, "B T K H"]:
            return jnp.take_along_axis(x, accepted[:, :, None, None], axis=1)

        pools = (branches.cache.k[layer], branches.cache.v[layer])
        table = batch.page_tables[windows.index(window)]
        k, v = branches.k[layer], branches.v[layer]
        if k is None:
            return pools
        return write_kv(pools, batch, table, accepted_heads(k), None if v is None else accepted_heads(v))

    layer_pools = [commit_layer(layer, window) for layer, window in enumerate(layer_windows)]
    return replace(branches.cache, k=tuple(k for k, _ in layer_pools), v=tuple(v for _, v in layer_pools))

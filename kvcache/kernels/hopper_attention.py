"""Attention of several queries per row over pages on Hopper GPUs (Pallas, Mosaic GPU backend).

Warp groups are specialised, as in FlashAttention-3 (Shah et al., arXiv 2407.08608). One copies tiles of keys
and values from their pages to a ring of shared memory (TMA), two multiply them with queries (`wgmma`). Rows
are tokens of a query head, or tokens' query heads of one key head.

Tiles of keys begin at multiples of their size. So bits depend neither on neighbours, nor on the page size,
nor on the widths of table and chunk. Keys that no query sees may hold anything. Their scores are replaced,
and their values in shared memory are overwritten with zeros.
"""

from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Shaped

from ...model.attention import MASK_VALUE, AttentionParams
from ...model.gpus import Kernel, may_use_kernel
from ..quantised import QuantisedPool
from .tiles import LOG2_E, LayerPages, SoftmaxState, visible_range

GROUP_ROWS, CONSUMER_WARPGROUPS = 64, 2  # rows of a warp group; warp groups that multiply
RING_TILES = 2  # tiles in the ring
TILE_SIZES = {64: 128, 128: 128, 192: 64, 256: 64}  # keys of a tile by the size of a head
MIN_PAGE_TOKENS = 16  # tokens; with smaller pages a tile would take more than eight copies
PIECE_COLUMNS = 64  # numbers of a swizzled piece of shared memory (layout of wgmma)
THREAD_REGISTERS = 232, 40  # registers of a thread that multiplies, and of a thread that copies
# Axes of the grid, and of a block's warp groups. A mesh's axes of the same names would take precedence.
BLOCK_AXIS, HEAD_AXIS, ROW_AXIS, GROUP_AXIS = (f"attend_{name}" for name in ("block", "head", "row", "group"))
HOPPER_PREFILL = Kernel("attention_prefill_hopper", "mosaic", "Triton's kernel attends to prompts")


class Ring(NamedTuple):
    """Shared memory of a block, and its barriers.

    queries: rows of each warp group that multiplies
    keys, values: tiles
    queries_ready: the queries have arrived
    keys_ready, values_ready: a tile has arrived
    keys_free, values_free: both groups have multiplied a tile, so its place is free
    masked_values_ready: a tile of values has arrived that must be masked first
    """

    queries: Any
    keys: Any
    values: Any
    queries_ready: Any
    keys_ready: Any
    values_ready: Any
    keys_free: Any
    values_free: Any
    masked_values_ready: Any


class Block(NamedTuple):
    """Work of a block: queries of one head, the keys [low, end) that they see, and the tiles [begin, stop) of
    these."""

    row: Any  # batch row
    head: Any  # head of the padded queries
    heads: int  # heads of the padded queries; each has `members` rows per token
    members: int
    first: Any  # first query row of the block
    start: Any  # position of the batch row's first token
    low: Any
    end: Any
    begin: Any
    stop: Any


@cache
def import_mosaic() -> Any:
    """Import the Mosaic GPU part of Pallas, which takes a second."""
    return import_module("jax.experimental.pallas.mosaic_gpu")


def fits_hopper_kernel(q: Shaped[Any, "B T N H"], k: Any, v: Any, attention: AttentionParams) -> bool:
    """True for several queries over pages of keys and values in q's 16-bit dtype."""
    if (
        v is None
        or isinstance(k, QuantisedPool)
        or attention.rank is not None
        or attention.softcap is not None
        or attention.alibi is not None
    ):
        return False
    plain = attention.selection is None and attention.expand is None and q.dtype.itemsize == 2
    (W, H), S = k.shape[2:], TILE_SIZES.get(q.shape[-1], 0)
    whole = S > 0 and W >= MIN_PAGE_TOKENS and (W % S == 0 or S % W == 0)
    same = k.dtype == v.dtype == q.dtype and k.shape == v.shape and H == q.shape[-1]
    return q.shape[1] > 1 and plain and whole and same


def may_use_hopper_kernel(q: Shaped[Any, "B T N H"], k: Any, v: Any, attention: AttentionParams) -> bool:
    """True if the kernel attends in programs for the GPU that is compiled for."""
    return fits_hopper_kernel(q, k, v, attention) and may_use_kernel(HOPPER_PREFILL)


def attend_chunk_hopper(
    q: Float[Array, "B T K G H"],
    pages: LayerPages,
    sinks: Float[Array, "K G"] | None,
    attention: AttentionParams,
    _: bool = False,  # unused: a context manager enters Mosaic's interpreter
) -> Float[Array, "B T K G H"]:
    """Attend to the pages of each row in blocks of 128 query rows. The last blocks run first. A block has one
    query head, or all query heads of a key head if a head has fewer rows. That changes no bits."""
    (B, T, K, G, H), block_rows = q.shape, CONSUMER_WARPGROUPS * GROUP_ROWS
    members = 1 if T >= block_rows else G
    rows = q if members == 1 else q.swapaxes(2, 3)
    rows = rows.reshape(B, T * members, K * G // members, H)
    rows = jnp.pad(rows, ((0, 0), (0, -T * members % GROUP_ROWS), (0, 0), (0, 0)))
    sink_scores = jnp.zeros((K, G), jnp.float32) if sinks is None else sinks
    out = import_mosaic().kernel(
        partial(block_kernel, has_sinks=sinks is not None, attention=attention),
        out_type=jax.ShapeDtypeStruct(rows.shape, q.dtype),
        scratch_types=list(make_ring(H, pages.k.shape[2], q.dtype)),
        grid=(pl.cdiv(rows.shape[1], block_rows), rows.shape[2], B),
        grid_names=(BLOCK_AXIS, HEAD_AXIS, ROW_AXIS),
        num_threads=CONSUMER_WARPGROUPS + 1,
        thread_name=GROUP_AXIS,
        compiler_params=import_mosaic().CompilerParams(approx_math=True),
        kernel_name="attend_chunk_hopper",
    )(rows, pages.k, pages.v, pages.table, pages.start, pages.count, sink_scores.reshape(-1, members))
    out = out[:, : T * members].reshape(B, T, *((K, G) if members == 1 else (G, K)), H)
    return out if members == 1 else out.swapaxes(2, 3)


def make_ring(H: int, W: int, dtype: Any) -> Ring:
    """Declare the shared memory of a block. H is the size of a head, W the tokens of a page."""
    gpu, S = import_mosaic(), TILE_SIZES[H]
    laid_out = {"transforms": (gpu.TilingTransform((8, PIECE_COLUMNS)), gpu.SwizzleTransform(128))}
    tile, copies = gpu.SMEM((RING_TILES, S, H), dtype, **laid_out), S // keys_per_copy(S, W)
    arriving = gpu.Barrier(num_arrivals=copies, num_barriers=RING_TILES)
    free = gpu.Barrier(num_arrivals=CONSUMER_WARPGROUPS, num_barriers=RING_TILES)
    queries = gpu.SMEM((CONSUMER_WARPGROUPS, GROUP_ROWS, H), dtype, **laid_out)
    queries_ready = gpu.Barrier(num_barriers=CONSUMER_WARPGROUPS)
    return Ring(
        queries, tile, tile, queries_ready, arriving, arriving, free, free, gpu.Barrier(num_arrivals=copies)
    )


def block_kernel(
    q: Any, k: Any, v: Any, table: Any, start: Any, count: Any, sinks: Any, out: Any, *shared: Any,
    has_sinks: bool, attention: AttentionParams,
):  # fmt: skip
    """Run each warp group's part of a block (kernel body)."""
    block = locate_block(q, start, count, sinks.shape[1], attention)
    group, ring = jax.lax.axis_index(GROUP_AXIS), Ring(*shared)

    @pl.when(group < CONSUMER_WARPGROUPS)
    def _():
        import_mosaic().set_max_registers(THREAD_REGISTERS[0], action="increase")
        attend_warpgroup(q, out, sinks if has_sinks else None, block, ring, group, attention)

    @pl.when(group == CONSUMER_WARPGROUPS)
    def _():
        import_mosaic().set_max_registers(THREAD_REGISTERS[1], action="decrease")
        copy_tiles(k, v, table, block, ring)


def locate_block(q: Any, start: Any, count: Any, members: int, attention: AttentionParams) -> Block:
    """Return the work of this block; it has no keys if no token is real."""
    block_rows, S = CONSUMER_WARPGROUPS * GROUP_ROWS, TILE_SIZES[q.shape[3]]
    row, head, block = map(jax.lax.axis_index, (ROW_AXIS, HEAD_AXIS, BLOCK_AXIS))
    first, position = (pl.cdiv(q.shape[1], block_rows) - 1 - block) * block_rows, start[row]
    token, last = jax.lax.div(first, members), jax.lax.div(first + (block_rows - 1), members)
    low, end = visible_range(position, count[row], position + token, last + 1 - token, attention)
    tiles = jax.lax.div(low, S), jax.lax.div(end + (S - 1), S)
    return Block(row, head, q.shape[2], members, first, position, low, end, *tiles)


# ---------------------------------------------------------------- the groups that multiply


def attend_warpgroup(
    q: Any, out: Any, sinks: Any, block: Block, ring: Ring, group: Any, attention: AttentionParams
):
    """Run the softmax of one warp group's queries over all tiles, and write the outputs."""
    gpu, (S, H) = import_mosaic(), ring.keys.shape[1:]
    # past the last rows, a group computes them again and stores nothing
    query_rows, rows = ring.queries.at[group], q.shape[1]
    first = jnp.minimum(block.first + group * GROUP_ROWS, rows - GROUP_ROWS)
    place = block.row, pl.ds(first, GROUP_ROWS), block.head
    gpu.copy_gmem_to_smem(q.at[place], query_rows, ring.queries_ready.at[group])
    gpu.barrier_wait(ring.queries_ready.at[group])

    def attend_tile(i: Any, state: SoftmaxState, masked: bool) -> SoftmaxState:
        """Add tile i to the softmax state."""
        slot = jax.lax.rem(i - block.begin, RING_TILES)
        gpu.barrier_wait(ring.keys_ready.at[slot])
        scores = multiply_queries(query_rows, ring.keys.at[slot])
        gpu.barrier_arrive(ring.keys_free.at[slot])
        mask = visible_mask(block, first, i * S, S, attention) if masked else None
        weights, (top, total, sums) = weigh_scores(scores, mask, state, attention.scale * LOG2_E)
        gpu.barrier_wait(ring.values_ready.at[slot])
        sums = add_weighted_values(sums, weights.astype(q.dtype), ring.values.at[slot])
        gpu.barrier_arrive(ring.values_free.at[slot])
        return top, total, sums

    # all queries see all keys of the tiles before `whole`, so these need no mask
    first_masked_tile = jax.lax.div(block.start + jax.lax.div(block.first, block.members) + 1, S)
    first_masked_tile = jnp.minimum(
        first_masked_tile if attention.window is None else block.begin, block.stop
    )
    state = initial_hopper_softmax(sinks, block, first, H)
    state = jax.lax.fori_loop(block.begin, first_masked_tile, partial(attend_tile, masked=False), state)
    _, total, sums = jax.lax.fori_loop(
        first_masked_tile, block.stop, partial(attend_tile, masked=True), state
    )
    query_rows[...] = (sums / broadcast_rows(jnp.maximum(total, 1e-30), sums.shape)).astype(q.dtype)
    gpu.commit_smem()

    @pl.when(block.first + group * GROUP_ROWS < rows)
    def _():
        gpu.copy_smem_to_gmem(query_rows, out.at[place])
        gpu.wait_smem_to_gmem(0)


def initial_hopper_softmax(sinks: Any, block: Block, first: Any, H: int) -> SoftmaxState:
    """Return the softmax state before the first key, of rows from `first` on: empty, or the sinks."""
    gpu = import_mosaic()
    by_rows, layout = gpu.Layout.WGMMA.reduce(1), gpu.Layout.WGMMA
    top, total = (jnp.full(GROUP_ROWS, x, jnp.float32) for x in (MASK_VALUE, 0.0 if sinks is None else 1.0))
    top, total = gpu.layout_cast(top, by_rows), gpu.layout_cast(total, by_rows)
    sums = gpu.layout_cast(jnp.zeros((GROUP_ROWS, H), jnp.float32), layout)
    if sinks is not None:
        member = jax.lax.rem(
            gpu.broadcasted_iota(jnp.int32, (GROUP_ROWS,), 0, layout=by_rows) + first, block.members
        )
        for g in range(block.members):
            top = jnp.where(member == g, sinks[block.head, g] * LOG2_E, top)
    return top, total, sums


def visible_mask(
    block: Block, first: Any, first_key: Any, S: int, attention: AttentionParams
) -> Bool[Array, "rows S"]:
    """True where queries from row `first` on see the S keys from position `first_key` on. Rows past the last
    token see the same keys as the last token."""
    gpu = import_mosaic()
    rows, keys = (
        gpu.broadcasted_iota(jnp.int32, (GROUP_ROWS, S), i, layout=gpu.Layout.WGMMA) for i in (0, 1)
    )
    token = jnp.minimum(jax.lax.div(rows + first, block.members) + block.start, block.end - 1)
    return attention.mask(token, keys + first_key)


def weigh_scores(
    scores: Float[Array, "rows S"], mask: Any, state: SoftmaxState, scale: float
) -> tuple[Float[Array, "rows S"], SoftmaxState]:
    """Return the weights of a tile's keys, and the state with its sums rescaled. Masked scores may be NaN or
    infinite."""
    top, total, sums = state
    masked_scores = scores if mask is None else jnp.where(mask, scores, MASK_VALUE)
    new_top = jnp.maximum(top, masked_scores.max(axis=1) * scale)
    fade, weights = jnp.exp2(top - new_top), jnp.exp2(scores * scale - broadcast_rows(new_top, scores.shape))
    weights = weights if mask is None else jnp.where(mask, weights, 0.0)
    return weights, (new_top, total * fade + weights.sum(axis=1), sums * broadcast_rows(fade, sums.shape))


def broadcast_rows(x: Float[Array, " rows"], shape: tuple[int, ...]) -> Float[Array, "rows S"]:
    """Broadcast one number per row over columns."""
    return jax.lax.broadcast_in_dim(x, shape, [0])


def multiply_queries(queries: Any, keys: Any) -> Float[Array, "rows S"]:
    """Multiply queries with keys in shared memory. Returns float32 scores."""
    gpu = import_mosaic()

    def multiply_into(sums: Any) -> Any:
        """Multiply into an accumulator, and read it."""
        gpu.wgmma(sums, queries, keys.transpose((1, 0)))
        return sums[...]

    return pl.run_scoped(multiply_into, gpu.ACC((queries.shape[0], keys.shape[0]), jnp.float32))


def add_weighted_values(sums: Float[Array, "rows H"], weights: Any, values: Any) -> Float[Array, "rows H"]:
    """Add to sums the products of weights with values in shared memory."""
    gpu = import_mosaic()
    return pl.run_state(lambda accumulator: gpu.wgmma(accumulator, weights, values))(gpu.ACC.init(sums))


# ---------------------------------------------------------------- the group that copies


def copy_tiles(k: Any, v: Any, table: Any, block: Block, ring: Ring):
    """Copy the tiles of keys and values to the ring, as places become free."""
    gpu = import_mosaic()

    @pl.loop(block.begin, block.stop)
    def _(i: Any):
        slot = jax.lax.rem(i - block.begin, RING_TILES)
        is_taken = i - block.begin >= RING_TILES

        @pl.when(is_taken)
        def _():
            gpu.barrier_wait(ring.keys_free.at[slot])

        copy_tile(k, table, block, i, ring.keys.at[slot], ring.keys_ready.at[slot])

        @pl.when(is_taken)
        def _():
            gpu.barrier_wait(ring.values_free.at[slot])

        copy_value_tile(v, table, block, i, slot, ring)

    @pl.loop(jnp.maximum(block.stop - RING_TILES, block.begin), block.stop)
    def _(i: Any):  # wait until both groups have arrived at every barrier, before the block ends
        slot = jax.lax.rem(i - block.begin, RING_TILES)
        gpu.barrier_wait(ring.keys_free.at[slot])
        gpu.barrier_wait(ring.values_free.at[slot])


def copy_tile(pool: Any, table: Any, block: Block, i: Any, tile: Any, barrier: Any):
    """Start the copies of tile i from its pages. Positions outside of the keys that are seen come from the
    row's nearest pages."""
    W, S = pool.shape[2], tile.shape[0]
    n, key_head = keys_per_copy(S, W), jax.lax.div(block.head, block.heads // pool.shape[0])
    for j in range(S // n):
        place = i * S + j * n
        page = jnp.clip(jax.lax.div(place, W), jax.lax.div(block.low, W), jax.lax.div(block.end - 1, W))
        offset = pl.multiple_of(jax.lax.rem(place, W), n)
        rows = pool.at[key_head, table[block.row, page], pl.ds(offset, n)]
        import_mosaic().copy_gmem_to_smem(rows, tile.at[pl.ds(j * n, n)], barrier)


def keys_per_copy(S: int, W: int) -> int:
    """Return the number of keys that one copy brings, of a tile of S keys and pages of W."""
    return min(S, W)


def copy_value_tile(v: Any, table: Any, block: Block, i: Any, slot: Any, ring: Ring):
    """Copy tile i of values, with zeros for keys that no query sees."""
    gpu, tile = import_mosaic(), ring.values.at[slot]
    S = tile.shape[0]
    is_whole = (i * S >= block.low) & ((i + 1) * S <= block.end)

    @pl.when(is_whole)
    def _():
        copy_tile(v, table, block, i, tile, ring.values_ready.at[slot])

    @pl.when(jnp.logical_not(is_whole))
    def _():
        copy_tile(v, table, block, i, tile, ring.masked_values_ready)
        gpu.barrier_wait(ring.masked_values_ready)
        clear_hidden_rows(tile, block.low - i * S, block.end - i * S)
        gpu.commit_smem()
        for _ in range(S // keys_per_copy(S, v.shape[2])):
            gpu.barrier_arrive(ring.values_ready.at[slot])


def clear_hidden_rows(tile: Any, low: Any, end: Any):
    """Write zeros to the rows of a tile outside of [low, end)."""
    gpu, shape = import_mosaic(), (GROUP_ROWS, PIECE_COLUMNS)
    rows = gpu.broadcasted_iota(jnp.int32, shape, 0, layout=gpu.Layout.WGMMA)
    for first in range(0, tile.shape[0], GROUP_ROWS):
        real = (rows + first >= low) & (rows + first < end)
        for column in range(0, tile.shape[1], PIECE_COLUMNS):
            piece = tile.at[pl.ds(first, GROUP_ROWS), pl.ds(column, PIECE_COLUMNS)]
            piece[...] = jnp.where(real, piece[...], jnp.zeros((), piece.dtype))

"""Attention of several queries a row over pages on Hopper GPUs (Pallas, Mosaic GPU backend).

Warp groups have roles, as in FlashAttention-3 (Shah et al., arXiv 2407.08608): one copies tiles of keys and
values from their pages into a ring of shared memory (TMA), two multiply them with queries (`wgmma`). Rows are
tokens of a query head, or tokens' query heads of one key head. Tiles of keys begin at multiples of their
size, so bits depend neither on neighbours, nor on the page size, nor on the widths of table and chunk. Keys
that no query sees may hold anything: their scores are replaced, and zeros written over their values in shared
memory.
"""

from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Shaped

from ...model.attention import UNSEEN, AttentionParams
from ...model.gpus import Kernel, may_use
from ..quantised import QuantisedPool
from .tiles import LOG2_E, LayerPages, Running, seen

ROWS, MULTIPLIERS = 64, 2  # rows of a warp group, and the groups that multiply
STAGES = 2  # tiles in the ring
TILES = {64: 128, 128: 128, 192: 64, 256: 64}  # keys of a tile by the size of a head
SMALLEST_PAGE = 16  # of fewer tokens a tile would take more than eight copies
COLUMNS = 64  # of a piece of shared memory, as it is laid out for the products
REGISTERS = 232, 40  # of a thread that multiplies, and of one that copies
# Of a block in the grid, and of its warp groups. A mesh has no axes of these names, which would come first.
BLOCK_AXIS, HEAD_AXIS, ROW_AXIS, GROUP_AXIS = (f"attend_{name}" for name in ("block", "head", "row", "group"))
HOPPER_PREFILL = Kernel("attention_prefill_hopper", "mosaic", "Triton's kernel attends to prompts")


class Ring(NamedTuple):
    """Shared memory of a block: queries of each group, tiles of keys and values, and their barriers.

    A tile has arrived (`keys_here`), and is free again (`keys_free`) when both groups have multiplied it.
    `raw` is for values that are not all seen.
    """

    queries: Any
    keys: Any
    values: Any
    queries_here: Any
    keys_here: Any
    values_here: Any
    keys_free: Any
    values_free: Any
    raw: Any


class Block(NamedTuple):
    """Place of a block, and the keys in [low, end) that its queries see, in the tiles [begin, stop)."""

    row: Any  # of the batch
    head: Any  # of queries
    heads: int  # of queries, each with all rows of a token (`members`) that the block has
    members: int
    first: Any  # of its rows of queries
    start: Any  # the position of the first token of the batch's row
    low: Any
    end: Any
    begin: Any
    stop: Any


@cache
def mosaic() -> Any:
    """Mosaic GPU's part of Pallas, which takes a second to import."""
    return import_module("jax.experimental.pallas.mosaic_gpu")


def supported(q: Shaped[Any, "B T N H"], k: Any, v: Any, reading: AttentionParams) -> bool:
    """True for several queries over pages of keys and values in q's 16-bit dtype."""
    if v is None or isinstance(k, QuantisedPool) or reading.rank is not None or reading.softcap is not None:
        return False
    plain = reading.selection is None and reading.expand is None and q.dtype.itemsize == 2
    (W, H), S = k.shape[2:], TILES.get(q.shape[-1], 0)
    whole = S > 0 and W >= SMALLEST_PAGE and (W % S == 0 or S % W == 0)
    same = k.dtype == v.dtype == q.dtype and k.shape == v.shape and H == q.shape[-1]
    return q.shape[1] > 1 and plain and whole and same


def has_kernel(q: Shaped[Any, "B T N H"], k: Any, v: Any, reading: AttentionParams) -> bool:
    """True if the kernel attends in programs for the GPU that is compiled for."""
    return supported(q, k, v, reading) and may_use(HOPPER_PREFILL)


def many_queries(
    q: Float[Array, "B T K G H"],
    pages: LayerPages,
    sinks: Float[Array, "K G"] | None,
    reading: AttentionParams,
    _: bool = False,  # Mosaic's interpreter is entered otherwise
) -> Float[Array, "B T K G H"]:
    """Attention of the rows' tokens over their pages; blocks of 128 rows of queries, the last ones first: of
    one query head, or of all of a key head where a head has fewer, which changes no bits."""
    (B, T, K, G, H), each = q.shape, MULTIPLIERS * ROWS
    members = 1 if T >= each else G
    rows = q if members == 1 else q.swapaxes(2, 3)
    rows = rows.reshape(B, T * members, K * G // members, H)
    rows = jnp.pad(rows, ((0, 0), (0, -T * members % ROWS), (0, 0), (0, 0)))
    given = jnp.zeros((K, G), jnp.float32) if sinks is None else sinks
    out = mosaic().kernel(
        partial(block_kernel, has_sinks=sinks is not None, reading=reading),
        out_type=jax.ShapeDtypeStruct(rows.shape, q.dtype),
        scratch_types=list(ring(H, pages.k.shape[2], q.dtype)),
        grid=(pl.cdiv(rows.shape[1], each), rows.shape[2], B),
        grid_names=(BLOCK_AXIS, HEAD_AXIS, ROW_AXIS),
        num_threads=MULTIPLIERS + 1,
        thread_name=GROUP_AXIS,
        compiler_params=mosaic().CompilerParams(approx_math=True),
        kernel_name="attend_chunk_hopper",
    )(rows, pages.k, pages.v, pages.table, pages.start, pages.count, given.reshape(-1, members))
    out = out[:, : T * members].reshape(B, T, *((K, G) if members == 1 else (G, K)), H)
    return out if members == 1 else out.swapaxes(2, 3)


def ring(H: int, W: int, dtype: Any) -> Ring:
    """Shared memory of a block."""
    gpu, S = mosaic(), TILES[H]
    laid_out = {"transforms": (gpu.TilingTransform((8, COLUMNS)), gpu.SwizzleTransform(128))}
    tile, copies = gpu.SMEM((STAGES, S, H), dtype, **laid_out), S // copied(S, W)
    arriving = gpu.Barrier(num_arrivals=copies, num_barriers=STAGES)
    free = gpu.Barrier(num_arrivals=MULTIPLIERS, num_barriers=STAGES)
    queries = gpu.SMEM((MULTIPLIERS, ROWS, H), dtype, **laid_out)
    here = gpu.Barrier(num_barriers=MULTIPLIERS)
    return Ring(queries, tile, tile, here, arriving, arriving, free, free, gpu.Barrier(num_arrivals=copies))


def block_kernel(
    q: Any, k: Any, v: Any, table: Any, start: Any, count: Any, sinks: Any, out: Any, *shared: Any,
    has_sinks: bool, reading: AttentionParams,
):  # fmt: skip
    """Give each warp group of a block its part."""
    at = block_of(q, start, count, sinks.shape[1], reading)
    group, own = jax.lax.axis_index(GROUP_AXIS), Ring(*shared)

    @pl.when(group < MULTIPLIERS)
    def _():
        mosaic().set_max_registers(REGISTERS[0], action="increase")
        multiply(q, out, sinks if has_sinks else None, at, own, group, reading)

    @pl.when(group == MULTIPLIERS)
    def _():
        mosaic().set_max_registers(REGISTERS[1], action="decrease")
        copy(k, v, table, at, own)


def block_of(q: Any, start: Any, count: Any, members: int, reading: AttentionParams) -> Block:
    """The block's place, and the keys that its tokens see; none if no token is real."""
    each, S = MULTIPLIERS * ROWS, TILES[q.shape[3]]
    row, head, block = map(jax.lax.axis_index, (ROW_AXIS, HEAD_AXIS, BLOCK_AXIS))
    first, position = (pl.cdiv(q.shape[1], each) - 1 - block) * each, start[row]
    token, last = jax.lax.div(first, members), jax.lax.div(first + (each - 1), members)
    low, end = seen(position, count[row], position + token, last + 1 - token, reading)
    tiles = jax.lax.div(low, S), jax.lax.div(end + (S - 1), S)
    return Block(row, head, q.shape[2], members, first, position, low, end, *tiles)


# ---------------------------------------------------------------- the groups that multiply


def multiply(q: Any, out: Any, sinks: Any, at: Block, own: Ring, group: Any, reading: AttentionParams):
    """The running softmax of a group's queries over all tiles."""
    gpu, (S, H) = mosaic(), own.keys.shape[1:]
    # behind the last rows a group computes these again, and stores nothing
    mine, rows = own.queries.at[group], q.shape[1]
    first = jnp.minimum(at.first + group * ROWS, rows - ROWS)
    place = at.row, pl.ds(first, ROWS), at.head
    gpu.copy_gmem_to_smem(q.at[place], mine, own.queries_here.at[group])
    gpu.barrier_wait(own.queries_here.at[group])

    def tile(i: Any, state: Running, masked: bool) -> Running:
        slot = jax.lax.rem(i - at.begin, STAGES)
        gpu.barrier_wait(own.keys_here.at[slot])
        scores = products(mine, own.keys.at[slot])
        gpu.barrier_arrive(own.keys_free.at[slot])
        mask = sees(at, first, i * S, S, reading) if masked else None
        weights, (top, total, sums) = weighted(scores, mask, state, reading.scale * LOG2_E)
        gpu.barrier_wait(own.values_here.at[slot])
        sums = add_products(sums, weights.astype(q.dtype), own.values.at[slot])
        gpu.barrier_arrive(own.values_free.at[slot])
        return top, total, sums

    # all queries see the keys of the tiles before `whole`
    whole = jax.lax.div(at.start + jax.lax.div(at.first, at.members) + 1, S)
    whole = jnp.minimum(whole if reading.window is None else at.begin, at.stop)
    state = no_keys(sinks, at, first, H)
    state = jax.lax.fori_loop(at.begin, whole, partial(tile, masked=False), state)
    _, total, sums = jax.lax.fori_loop(whole, at.stop, partial(tile, masked=True), state)
    mine[...] = (sums / across(jnp.maximum(total, 1e-30), sums.shape)).astype(q.dtype)
    gpu.commit_smem()

    @pl.when(at.first + group * ROWS < rows)
    def _():
        gpu.copy_smem_to_gmem(mine, out.at[place])
        gpu.wait_smem_to_gmem(0)


def no_keys(sinks: Any, at: Block, first: Any, H: int) -> Running:
    """The running softmax before any key, of rows from `first` on: nothing, or the sinks."""
    gpu = mosaic()
    by_rows, each = gpu.Layout.WGMMA.reduce(1), gpu.Layout.WGMMA
    top, total = (jnp.full(ROWS, x, jnp.float32) for x in (UNSEEN, 0.0 if sinks is None else 1.0))
    top, total = gpu.layout_cast(top, by_rows), gpu.layout_cast(total, by_rows)
    sums = gpu.layout_cast(jnp.zeros((ROWS, H), jnp.float32), each)
    if sinks is not None:
        member = jax.lax.rem(gpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=by_rows) + first, at.members)
        for g in range(at.members):
            top = jnp.where(member == g, sinks[at.head, g] * LOG2_E, top)
    return top, total, sums


def sees(at: Block, first: Any, key: Any, S: int, reading: AttentionParams) -> Bool[Array, "rows S"]:
    """Which of S keys, from the position `key` on, the queries from row `first` on see; those of no token see
    what the last one does."""
    gpu = mosaic()
    rows, keys = (gpu.broadcasted_iota(jnp.int32, (ROWS, S), i, layout=gpu.Layout.WGMMA) for i in (0, 1))
    token = jnp.minimum(jax.lax.div(rows + first, at.members) + at.start, at.end - 1)
    return reading.sees(token, keys + key)


def weighted(
    scores: Float[Array, "rows S"], mask: Any, state: Running, scale: float
) -> tuple[Float[Array, "rows S"], Running]:
    """Weights of the keys, and the state with its sums faded. Masked scores may be no numbers."""
    top, total, sums = state
    found = scores if mask is None else jnp.where(mask, scores, UNSEEN)
    new = jnp.maximum(top, found.max(axis=1) * scale)
    fade, weights = jnp.exp2(top - new), jnp.exp2(scores * scale - across(new, scores.shape))
    weights = weights if mask is None else jnp.where(mask, weights, 0.0)
    return weights, (new, total * fade + weights.sum(axis=1), sums * across(fade, sums.shape))


def across(x: Float[Array, " rows"], shape: tuple[int, ...]) -> Float[Array, "rows S"]:
    return jax.lax.broadcast_in_dim(x, shape, [0])


def products(queries: Any, keys: Any) -> Float[Array, "rows S"]:
    """Products of queries and keys in shared memory, in float32."""
    gpu = mosaic()

    def found(sums: Any) -> Any:
        gpu.wgmma(sums, queries, keys.transpose((1, 0)))
        return sums[...]

    return pl.run_scoped(found, gpu.ACC((queries.shape[0], keys.shape[0]), jnp.float32))


def add_products(sums: Float[Array, "rows H"], weights: Any, values: Any) -> Float[Array, "rows H"]:
    """Sums with the products of weights and of values in shared memory."""
    gpu = mosaic()
    return pl.run_state(lambda own: gpu.wgmma(own, weights, values))(gpu.ACC.init(sums))


# ---------------------------------------------------------------- the group that copies


def copy(k: Any, v: Any, table: Any, at: Block, own: Ring):
    """Bring the tiles into the ring, as places in it are free."""
    gpu = mosaic()

    @pl.loop(at.begin, at.stop)
    def _(i: Any):
        slot = jax.lax.rem(i - at.begin, STAGES)
        is_taken = i - at.begin >= STAGES

        @pl.when(is_taken)
        def _():
            gpu.barrier_wait(own.keys_free.at[slot])

        copy_tile(k, table, at, i, own.keys.at[slot], own.keys_here.at[slot])

        @pl.when(is_taken)
        def _():
            gpu.barrier_wait(own.values_free.at[slot])

        copy_values(v, table, at, i, slot, own)

    @pl.loop(jnp.maximum(at.stop - STAGES, at.begin), at.stop)
    def _(i: Any):  # a barrier is not left before all have arrived
        slot = jax.lax.rem(i - at.begin, STAGES)
        gpu.barrier_wait(own.keys_free.at[slot])
        gpu.barrier_wait(own.values_free.at[slot])


def copy_tile(pool: Any, table: Any, at: Block, i: Any, tile: Any, barrier: Any):
    """The copies of a tile's pages, or of a part of one. Beside keys that are seen are those of pages that
    the row has."""
    W, S = pool.shape[2], tile.shape[0]
    n, key_head = copied(S, W), jax.lax.div(at.head, at.heads // pool.shape[0])
    for j in range(S // n):
        place = i * S + j * n
        page = jnp.clip(jax.lax.div(place, W), jax.lax.div(at.low, W), jax.lax.div(at.end - 1, W))
        offset = pl.multiple_of(jax.lax.rem(place, W), n)
        rows = pool.at[key_head, table[at.row, page], pl.ds(offset, n)]
        mosaic().copy_gmem_to_smem(rows, tile.at[pl.ds(j * n, n)], barrier)


def copied(S: int, W: int) -> int:
    """Keys of a tile that one copy brings."""
    return min(S, W)


def copy_values(v: Any, table: Any, at: Block, i: Any, slot: Any, own: Ring):
    """A tile of values; zeros stand for those that are not seen."""
    gpu, tile = mosaic(), own.values.at[slot]
    S = tile.shape[0]
    is_whole = (i * S >= at.low) & ((i + 1) * S <= at.end)

    @pl.when(is_whole)
    def _():
        copy_tile(v, table, at, i, tile, own.values_here.at[slot])

    @pl.when(jnp.logical_not(is_whole))
    def _():
        copy_tile(v, table, at, i, tile, own.raw)
        gpu.barrier_wait(own.raw)
        clear(tile, at.low - i * S, at.end - i * S)
        gpu.commit_smem()
        for _ in range(S // copied(S, v.shape[2])):
            gpu.barrier_arrive(own.values_here.at[slot])


def clear(tile: Any, low: Any, end: Any):
    """Write zeros over the rows of a tile outside of [low, end)."""
    gpu, shape = mosaic(), (ROWS, COLUMNS)
    rows = gpu.broadcasted_iota(jnp.int32, shape, 0, layout=gpu.Layout.WGMMA)
    for first in range(0, tile.shape[0], ROWS):
        real = (rows + first >= low) & (rows + first < end)
        for column in range(0, tile.shape[1], COLUMNS):
            piece = tile.at[pl.ds(first, ROWS), pl.ds(column, COLUMNS)]
            piece[...] = jnp.where(real, piece[...], jnp.zeros((), piece.dtype))

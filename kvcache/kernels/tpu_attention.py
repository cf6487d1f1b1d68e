"""Attention over pages on TPUs: a Pallas kernel (Mosaic) that reads pages where they lie.

A running softmax over tiles of keys, as in FlashAttention (Dao et al., arXiv 2205.14135). Chunks of a row's
queries go one after the other. While the tiles of a block of pages are multiplied, the pages of the next
block are copied into vector memory, all key heads of a page at once, also those of the next chunk. Tiles
begin at multiples of their size, so the order of a query's sums depends neither on its neighbours, nor on the
page size, nor on the widths of table and chunk. Pools of 8 bits and selected keys are left to the reference.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import lcm
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jaxtyping import Array, Bool, Float, Int, Shaped

from ...model.attention import UNSEEN, AttentionParams
from ...model.gpus import Kernel, may_use
from ...model.layers import einsum
from ..quantised import QuantisedPool
from .partitioned import by_each_device
from .tiles import LayerPages, cost, seen, value_size

LANES = 128  # numbers of a register's row
SUBLANES = 8  # rows of 32 bits
TILE = 256  # keys of one product
AT_ONCE, MOST_AT_ONCE = 8, 1024  # key heads whose products overlap, and rows of these products
COPIED = 2 << 20  # bytes of keys and values that are copied at once, so that the copies' latency is hidden
MOST_COPIED = 24 << 20
VECTOR_MEMORY = 64 << 20
MOST_ENTRIES = 1 << 17  # of page tables in scalar memory
MOST_QUERIES = 512  # rows of one product
MOST_ROWS = 4096  # of all key heads
MOST_HELD = 24 << 20  # bytes of their queries, outputs and sums
DECODE = Kernel("attention_decode", "tpu", "attention gathers pages")
PREFILL = Kernel("attention_prefill", "tpu", "attention gathers pages")


class Chunks(NamedTuple):
    """Chunks of the rows' queries, in scalar memory: of each the position of its first query; the keys in
    [low, end) that it reads, those before `kept` from pages. `following[i]` is the first chunk from i on that
    reads any, or their number. The page table of B rows is flat."""

    first: Any  # int32 [chunks]
    low: Any  # int32 [chunks]
    end: Any  # int32 [chunks]
    kept: Any  # int32 [chunks]
    following: Any  # int32 [chunks+1]
    table: Any  # int32 [B*M]


class PageCopies(NamedTuple):
    """Copies of pages into vector memory, which has two places for a block of them. `a_row` is the number of
    a row's chunks; `arrived` has a semaphore for each place and pool."""

    chunks: Chunks
    a_row: int
    pools: Any  # one or two of [K,P,W,H]
    buffers: Any  # of each [2,K,S,H]
    arrived: Any

    def each(self, act: Callable[[Any], None], chunk: Any, block: Any, place: Any) -> None:
        """Act on the copies of a block's pages, as far as a chunk reads them: start them, or wait."""
        chunks, M = self.chunks, self.chunks.table.shape[0] * self.a_row // self.chunks.low.shape[0]
        W, S = self.pools[0].shape[2], self.buffers[0].shape[2]
        first, row = block * (S // W), chunk // self.a_row

        def page(i: Any, _: Any) -> None:
            at = pl.ds(pl.multiple_of((i - first) * W, W), W)
            for n, (pool, buffer) in enumerate(zip(self.pools, self.buffers, strict=True)):
                source = pool.at[:, chunks.table[row * M + i]]
                act(tpu.make_async_copy(source, buffer.at[place, :, at], self.arrived.at[place, n]))

        until = jnp.minimum(pl.cdiv(chunks.kept[chunk], W), first + S // W)
        jax.lax.fori_loop(jnp.maximum(chunks.low[chunk] // W, first), until, page, None)


class Sums(NamedTuple):
    """The running softmax: highest scores and totals [K,R,LANES], the same in all lanes, and weighted values
    [K,R,U]."""

    top: Any
    total: Any
    out: Any


def supported(q: Any, pages: LayerPages, reading: AttentionParams) -> bool:
    """True if the kernel reads these pages with queries [B,T,N,H], arrays or shapes, on a TPU."""
    k, v = pages.k, pages.k if pages.v is None else pages.v
    if isinstance(k, QuantisedPool) or isinstance(v, QuantisedPool) or reading.selection is not None:
        return False
    if (pages.own and q.shape[1] > 1) or (reading.expand is not None) != (reading.rank is not None):
        return False
    W, H = k.shape[2:]
    sizes = H % LANES, (reading.rank or 0) % LANES, W % (SUBLANES * 4 // k.dtype.itemsize)
    alike = k.shape == v.shape and k.dtype == v.dtype == q.dtype and k.dtype.name in ("bfloat16", "float32")
    small = 2 * block_size(pages) * token_bytes(pages) <= MOST_COPIED and pages.table.size <= MOST_ENTRIES
    return alike and not any(sizes) and small


def has_kernel(q: Any, pages: LayerPages, reading: AttentionParams) -> bool:
    return may_use(kernel_of(q.shape[1])) and supported(q, pages, reading)


def kernel_of(T: int) -> Kernel:
    """The kernel of T queries of a row, by the name under which it is checked."""
    return DECODE if T == 1 else PREFILL


def token_bytes(pages: LayerPages) -> int:
    """Bytes of a token's keys and values."""
    return sum(x.shape[0] * x.shape[3] * x.dtype.itemsize for x in pages[:2] if x is not None)


def block_size(pages: LayerPages) -> int:
    """Tokens of the pages that are copied at once: whole pages and whole tiles."""
    least = lcm(pages.k.shape[2], TILE)
    return least * max(1, COPIED // (least * token_bytes(pages)))


def attend_pages(
    q: Float[Array, "B T N H"], pages: LayerPages, reading: AttentionParams, interpret: bool = False
) -> Float[Array, "B T N U"]:
    """Attention of the rows' tokens over their pages, in q's dtype; empty rows are zeros."""
    return by_each_device(by_chunks, q, pages, reading, interpret)


def by_chunks(
    q: Float[Array, "B T K G H"],
    pages: LayerPages,
    sinks: Float[Array, "K G"] | None,
    reading: AttentionParams,
    interpret: bool,
) -> Float[Array, "B T K G U"]:
    """The same of one device. The query heads of a key head, of a chunk's tokens, are rows of one product."""
    (B, T, K, G, H), U, S = q.shape, value_size(q, reading), block_size(pages)
    size = min(T, max(1, most_rows(K, H, U, q.dtype.itemsize) // G))
    n, R = pl.cdiv(T, size), size * G
    token = jnp.repeat(jnp.arange(size, dtype=jnp.int32), G)
    if sinks is not None:
        sinks = in_all_lanes(jnp.tile(sinks, (1, size)))
    pools = tuple(pool for pool in pages[:2] if pool is not None)
    whole, each = partial(in_vector_memory, each=False), partial(in_vector_memory, each=True)
    queries, tokens, own = rows_of(q, size), in_all_lanes(token), own_keys(pages)
    out = pl.pallas_call(
        partial(chunk_kernel, a_row=n, reading=reading),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B * n,),
            in_specs=(
                each(queries),
                whole(tokens),
                jax.tree.map(whole, sinks),
                jax.tree.map(each, own),
                jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), pools),
            ),
            out_specs=each(jax.ShapeDtypeStruct((B * n, K, R, U), q.dtype)),
            scratch_shapes=(
                tuple(tpu.VMEM((2, K, S, pool.shape[-1]), pool.dtype) for pool in pools),
                tpu.SemaphoreType.DMA((2, len(pools))),
                tpu.SMEM((1,), jnp.int32),
                Sums(*(tpu.VMEM((K, R, width), jnp.float32) for width in (LANES, LANES, U))),
            ),
        ),
        out_shape=jax.ShapeDtypeStruct((B * n, K, R, U), q.dtype),
        cost_estimate=cost(q, pages, reading),
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VECTOR_MEMORY, disable_bounds_checks=True
        ),
        interpret=tpu.InterpretParams() if interpret else False,
        name="attend_chunk",
    )(chunks_of(pages, size, n, reading), queries, tokens, sinks, own, pools)
    found = out.reshape(B, n, K, size, G, U).swapaxes(2, 3)
    return found.reshape(B, n * size, K, G, U)[:, :T]


def most_rows(K: int, H: int, U: int, itemsize: int) -> int:
    """Rows of a product: queries and outputs of two chunks, and the sums, are in vector memory."""
    each = 2 * (H + U) * itemsize + (2 * LANES + U) * 4
    return min(MOST_QUERIES, min(MOST_ROWS, MOST_HELD // each) // K)


def rows_of(q: Float[Array, "B T K G H"], size: int) -> Float[Array, "chunks K R H"]:
    """Queries of chunks of `size` tokens as rows; zeros stand for tokens behind the last."""
    B, T, K, G, H = q.shape
    n = pl.cdiv(T, size)
    chunks = jnp.pad(q, ((0, 0), (0, n * size - T), (0, 0), (0, 0), (0, 0))).reshape(B * n, size, K, G, H)
    return chunks.swapaxes(1, 2).reshape(B * n, K, size * G, H)


def in_vector_memory(x: Any, each: bool) -> pl.BlockSpec:
    """All of an array, or the part of each chunk, of an array by chunks."""
    if each:
        return pl.BlockSpec((1, *x.shape[1:]), lambda chunk, *_: (chunk, *(0,) * (x.ndim - 1)))
    return pl.BlockSpec(x.shape, lambda chunk, *_: (0,) * x.ndim)


def chunks_of(pages: LayerPages, size: int, n: int, reading: AttentionParams) -> Chunks:
    """The n chunks of each row, of `size` tokens."""
    first = pages.start[:, None] + size * jnp.arange(n, dtype=jnp.int32)[None]
    low, end = seen(pages.start[:, None], pages.count[:, None], first, size, reading)
    kept = end if pages.own is None else jnp.minimum(end, pages.own[2][:, None])
    first, low, end, kept = (x.reshape(-1) for x in (first, low, end, kept))
    none = jnp.int32(len(end))
    each = jnp.append(jnp.where(end > 0, jnp.arange(len(end), dtype=jnp.int32), none), none)
    return Chunks(first, low, end, kept, jax.lax.cummin(each, reverse=True), pages.table.reshape(-1))


def own_keys(pages: LayerPages) -> tuple[Float[Array, "B K n H"], ...]:
    """Keys and values that stand for the last of a row's, with zeros behind them; nothing if none do."""
    if pages.own is None:
        return ()
    *found, root = pages.own
    place = jnp.arange(found[0].shape[1], dtype=jnp.int32)
    is_read = (place[None] < (pages.start + pages.count - root)[:, None])[..., None, None]
    return tuple(jnp.where(is_read, x, 0).swapaxes(1, 2) for x in found if x is not None)


def chunk_kernel(
    chunks: Chunks,
    q: Any,
    tokens: Any,
    sinks: Any,
    own: Sequence[Any],
    pools: Sequence[Any],
    out: Any,
    buffers: Sequence[Any],
    arrived: Any,
    turn: Any,
    sums: Sums,
    *,
    a_row: int,
    reading: AttentionParams,
):
    """The queries of a chunk: its blocks of keys, of which the first is copied while the chunk before is
    read."""
    this, S = pl.program_id(0), buffers[0].shape[2]
    first, low, end, kept = (x[this] for x in chunks[:4])
    copies = PageCopies(chunks, a_row, pools, buffers, arrived)

    def first_block(chunk: Any) -> Any:
        return chunks.low[jnp.minimum(chunk, pl.num_programs(0) - 1)] // S

    def begin(chunk: Any, block: Any, place: Any) -> None:
        pl.when(chunk < pl.num_programs(0))(lambda: copies.each(lambda x: x.start(), chunk, block, place))

    @pl.when(this == 0)
    def _() -> None:
        turn[0] = 0
        begin(chunks.following[0], first_block(chunks.following[0]), 0)

    def block(j: Any, _: Any) -> None:
        place, is_last = turn[0], (j + 1) * S >= end
        turn[0] = 1 - place
        following = jnp.where(is_last, chunks.following[this + 1], this)
        begin(following, jnp.where(is_last, first_block(following), j + 1), 1 - place)
        copies.each(lambda x: x.wait(), this, j, place)

        def tile(t: Any, _: Any) -> None:
            at = pl.ds(pl.multiple_of(t * TILE - j * S, TILE), TILE)
            parts = [buffer.at[place, :, at] for buffer in buffers]
            lay_edges(parts, own, t * TILE, (low, end, kept))
            keys = t * TILE + jax.lax.broadcasted_iota(jnp.int32, (1, TILE), 1)
            # tokens that are not real see no more than the last
            sees = reading.sees(jnp.minimum(first + over_lanes(tokens[...], TILE), end - 1), keys)
            add_tile(q.at[0], parts, sees, sums, reading)

        until = pl.cdiv(jnp.minimum(end, (j + 1) * S), TILE)
        jax.lax.fori_loop(jnp.maximum(low, j * S) // TILE, until, tile, None)

    before_any_key(sums, sinks)
    jax.lax.fori_loop(low // S, pl.cdiv(end, S), block, None)
    for head in range(q.shape[1]):
        total = jnp.maximum(sums.total[head], 1e-30)
        out[0, head] = (sums.out[head] / over_lanes(total, out.shape[-1])).astype(out.dtype)


def lay_edges(parts: Sequence[Any], own: Sequence[Any], first: Any, row: tuple[Any, Any, Any]) -> None:
    """Put a row's own keys and values where pages do not have them, and zeros for values that it does not
    see: others may hold anything. `parts` [K,TILE,H] begin at the position `first`."""
    low, end, kept = row

    @pl.when((first < low) | (first + TILE > kept))
    def _() -> None:
        at = first + jax.lax.broadcasted_iota(jnp.int32, (TILE, 1), 0)
        for head in range(parts[0].shape[0]):
            for part, new in zip(parts, own, strict=False):
                part[head] = jnp.where(at >= kept, chosen_rows(at - kept, new[0, head]), part[head])
            values = parts[-1][head]
            parts[-1][head] = jnp.where((at >= low) & (at < end), values, jnp.zeros_like(values))


def chosen_rows(index: Int[Array, "S 1"], x: Float[Array, "n H"]) -> Float[Array, "S H"]:
    """Rows of x, by a product with ones and zeros, which rounds nothing."""
    is_row = index == jax.lax.broadcasted_iota(jnp.int32, (1, len(x)), 1)
    return einsum("sn,nh->sh", is_row.astype(x.dtype), x, jnp.float32).astype(x.dtype)


def add_tile(
    q: Any, parts: Sequence[Any], sees: Bool[Array, "R S"], sums: Sums, reading: AttentionParams
) -> None:
    """Take the running softmax of all key heads on by a tile of keys; some heads at once, whose products then
    overlap."""
    (K, S, _), (_, R, U) = parts[0].shape, sums.out.shape
    many = min(AT_ONCE, max(1, MOST_AT_ONCE // R))
    for first in range(0, K, many):
        heads = range(first, min(first + many, K))
        products = [einsum("rh,sh->rs", q[i], parts[0][i], jnp.float32) for i in heads]
        scores = [jnp.where(sees, reading.scores(x), UNSEEN) for x in products]
        tops = [
            jnp.maximum(sums.top[i], x.max(-1, keepdims=True)) for i, x in zip(heads, scores, strict=True)
        ]
        weights = [jnp.exp(x - over_lanes(top, S)) for x, top in zip(scores, tops, strict=True)]
        values = [parts[-1][i, :, :U] for i in heads]
        added = [
            einsum("rs,su->ru", w.astype(v.dtype), v, jnp.float32)
            for w, v in zip(weights, values, strict=True)
        ]
        for i, top, w, add in zip(heads, tops, weights, added, strict=True):
            fade = jnp.exp(sums.top[i] - top)
            sums.total[i] = sums.total[i] * fade + w.sum(-1, keepdims=True)
            sums.out[i] = sums.out[i] * over_lanes(fade, U) + add
            sums.top[i] = top


def in_all_lanes(x: Shaped[Array, "*rows"]) -> Shaped[Array, "*rows LANES"]:
    return jnp.broadcast_to(x[..., None], (*x.shape, LANES))


def over_lanes(x: Shaped[Array, "R LANES"], size: int) -> Shaped[Array, "R size"]:
    """Numbers that are the same in all lanes, in as many lanes."""
    return jnp.tile(x, (1, size // LANES))


def before_any_key(sums: Sums, sinks: Any) -> None:
    """The running softmax at the start: nothing, or the sinks."""
    sums.top[...] = jnp.full(sums.top.shape, UNSEEN, jnp.float32) if sinks is None else sinks[...]
    sums.total[...] = jnp.full(sums.total.shape, 0.0 if sinks is None else 1.0, jnp.float32)
    sums.out[...] = jnp.zeros(sums.out.shape, jnp.float32)

"""Attention over pages on TPUs: a Pallas kernel (Mosaic) that reads pages in place.

A running softmax over tiles of keys, as in FlashAttention (Dao et al., arXiv 2205.14135). Chunks of a row's
queries are processed one after the other. While the tiles of a block of pages are multiplied, the pages of
the next block are copied to vector memory (double buffering). A copy has all key heads of a page. The next
block may belong to the next chunk.

Tiles begin at multiples of their size. So the order of a query's sums depends neither on its neighbours, nor
on the page size, nor on the widths of table and chunk. The reference handles 8-bit pools and selected keys.
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

from ...model.attention import MASK_VALUE, AttentionParams
from ...model.gpus import Kernel, may_use_kernel
from ...model.layers import einsum
from ..quantised import QuantisedPool
from .sharded_attention import attend_on_devices
from .tiles import LayerPages, attention_cost, value_size, visible_range

LANES = 128  # numbers of a vector register's row
SUBLANES = 8  # rows of a vector register, of 32 bits each
TILE_TOKENS = 256  # keys of one product
# At most: key heads whose products overlap, and rows of these products.
OVERLAPPED_HEADS, MAX_OVERLAPPED_ROWS = 8, 1024
COPY_BYTES = 2 << 20  # bytes of keys and values that are copied at once, to hide the latency of the copies
MAX_COPY_BYTES = 24 << 20  # bytes of both buffers, at most
VECTOR_MEMORY_BYTES = 64 << 20  # bytes that the kernel may use
MAX_TABLE_ENTRIES = 1 << 17  # entries of page tables in scalar memory, at most
MAX_PRODUCT_QUERIES = 512  # rows of one key head's product, at most
MAX_CHUNK_ROWS = 4096  # rows of all key heads, at most
MAX_HELD_BYTES = 24 << 20  # bytes of these rows' queries, outputs and sums, at most
TPU_DECODE = Kernel("attention_decode", "tpu", "attention gathers pages")
TPU_PREFILL = Kernel("attention_prefill", "tpu", "attention gathers pages")


class Chunks(NamedTuple):
    """Chunks of the rows' queries, in scalar memory.

    first: position of a chunk's first query
    low, end: keys [low, end) that a chunk reads
    paged_end: end of the keys that it reads from pages
    next_nonempty: first chunk from each number on that reads any keys, or the number of chunks
    table: page table of all rows, flat
    """

    first: Any  # int32 [chunks]
    low: Any  # int32 [chunks]
    end: Any  # int32 [chunks]
    paged_end: Any  # int32 [chunks]
    next_nonempty: Any  # int32 [chunks+1]
    table: Any  # int32 [B*M]


class PageCopies(NamedTuple):
    """Copies of pages to vector memory, which has two buffers for a block of pages.

    chunks_per_row: chunks of a row
    pools: one or two of [K,P,W,H]
    buffers: for each pool [2,K,S,H]
    semaphores: a semaphore for each buffer and pool
    """

    chunks: Chunks
    chunks_per_row: int
    pools: Any  # one or two of [K,P,W,H]
    buffers: Any  # of each [2,K,S,H]
    semaphores: Any

    def visit_copies(self, act: Callable[[Any], None], chunk: Any, block: Any, buffer_index: Any) -> None:
        """Call `act` on the copy of each page of a block that a chunk reads: start it, or wait for it."""
        chunks, M = self.chunks, self.chunks.table.shape[0] * self.chunks_per_row // self.chunks.low.shape[0]
        W, S = self.pools[0].shape[2], self.buffers[0].shape[2]
        first, row = block * (S // W), chunk // self.chunks_per_row

        def visit_page(i: Any, _: Any) -> None:
            """Call `act` on the copies of page i."""
            at = pl.ds(pl.multiple_of((i - first) * W, W), W)
            for n, (pool, buffer) in enumerate(zip(self.pools, self.buffers, strict=True)):
                source = pool.at[:, chunks.table[row * M + i]]
                act(
                    tpu.make_async_copy(
                        source, buffer.at[buffer_index, :, at], self.semaphores.at[buffer_index, n]
                    )
                )

        end_page = jnp.minimum(pl.cdiv(chunks.paged_end[chunk], W), first + S // W)
        jax.lax.fori_loop(jnp.maximum(chunks.low[chunk] // W, first), end_page, visit_page, None)


class Sums(NamedTuple):
    """State of the running softmax.

    top, total: highest scores and total weights [K,R,LANES], equal in all lanes
    out: weighted sums of values [K,R,U]
    """

    top: Any
    total: Any
    out: Any


def fits_tpu_kernel(q: Any, pages: LayerPages, attention: AttentionParams) -> bool:
    """True if the kernel reads these pages with queries [B,T,N,H], arrays or shapes, on a TPU."""
    k, v = pages.k, pages.k if pages.v is None else pages.v
    if isinstance(k, QuantisedPool) or isinstance(v, QuantisedPool) or attention.selection is not None:
        return False
    if attention.alibi is not None:
        return False
    if (pages.tail and q.shape[1] > 1) or (attention.expand is not None) != (attention.rank is not None):
        return False
    W, H = k.shape[2:]
    sizes = H % LANES, (attention.rank or 0) % LANES, W % (SUBLANES * 4 // k.dtype.itemsize)
    alike = k.shape == v.shape and k.dtype == v.dtype == q.dtype and k.dtype.name in ("bfloat16", "float32")
    small = (
        2 * copied_block_tokens(pages) * kv_token_bytes(pages) <= MAX_COPY_BYTES
        and pages.table.size <= MAX_TABLE_ENTRIES
    )
    return alike and not any(sizes) and small


def has_tpu_kernel(q: Any, pages: LayerPages, attention: AttentionParams) -> bool:
    """True if the kernel attends in programs for the TPU that is compiled for."""
    return may_use_kernel(choose_tpu_kernel(q.shape[1])) and fits_tpu_kernel(q, pages, attention)


def choose_tpu_kernel(T: int) -> Kernel:
    """Return the kernel of T queries per row, by the name under which it is checked."""
    return TPU_DECODE if T == 1 else TPU_PREFILL


def kv_token_bytes(pages: LayerPages) -> int:
    """Return the bytes of a token's keys and values."""
    return sum(x.shape[0] * x.shape[3] * x.dtype.itemsize for x in pages[:2] if x is not None)


def copied_block_tokens(pages: LayerPages) -> int:
    """Return the tokens of the pages that are copied at once: whole pages and whole tiles."""
    least = lcm(pages.k.shape[2], TILE_TOKENS)
    return least * max(1, COPY_BYTES // (least * kv_token_bytes(pages)))


def attend_tpu(
    q: Float[Array, "B T N H"], pages: LayerPages, attention: AttentionParams, interpret: bool = False
) -> Float[Array, "B T N U"]:
    """Attend to the pages of each row. Returns outputs in q's dtype. Empty rows get zeros."""
    return attend_on_devices(attend_chunks, q, pages, attention, interpret)


def attend_chunks(
    q: Float[Array, "B T K G H"],
    pages: LayerPages,
    sinks: Float[Array, "K G"] | None,
    attention: AttentionParams,
    interpret: bool,
) -> Float[Array, "B T K G U"]:
    """Attend on one device, chunk by chunk. Rows of a product are the query heads of a key head, for all
    tokens of a chunk."""
    (B, T, K, G, H), U, S = q.shape, value_size(q, attention), copied_block_tokens(pages)
    size = min(T, max(1, max_chunk_rows(K, H, U, q.dtype.itemsize) // G))
    n, R = pl.cdiv(T, size), size * G
    token = jnp.repeat(jnp.arange(size, dtype=jnp.int32), G)
    if sinks is not None:
        sinks = broadcast_lanes(jnp.tile(sinks, (1, size)))
    pools = tuple(pool for pool in pages[:2] if pool is not None)
    whole_spec, chunk_spec = (
        partial(vector_memory_spec, is_chunked=False),
        partial(vector_memory_spec, is_chunked=True),
    )
    queries, tokens, tail = queries_by_chunk(q, size), broadcast_lanes(token), tail_kv(pages)
    out = pl.pallas_call(
        partial(tpu_chunk_kernel, chunks_per_row=n, attention=attention),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B * n,),
            in_specs=(
                chunk_spec(queries),
                whole_spec(tokens),
                jax.tree.map(whole_spec, sinks),
                jax.tree.map(chunk_spec, tail),
                jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), pools),
            ),
            out_specs=chunk_spec(jax.ShapeDtypeStruct((B * n, K, R, U), q.dtype)),
            scratch_shapes=(
                tuple(tpu.VMEM((2, K, S, pool.shape[-1]), pool.dtype) for pool in pools),
                tpu.SemaphoreType.DMA((2, len(pools))),
                tpu.SMEM((1,), jnp.int32),
                Sums(*(tpu.VMEM((K, R, width), jnp.float32) for width in (LANES, LANES, U))),
            ),
        ),
        out_shape=jax.ShapeDtypeStruct((B * n, K, R, U), q.dtype),
        cost_estimate=attention_cost(q, pages, attention),
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=VECTOR_MEMORY_BYTES,
            disable_bounds_checks=True,
        ),
        interpret=tpu.InterpretParams() if interpret else False,
        name="attend_chunk",
    )(plan_chunks(pages, size, n, attention), queries, tokens, sinks, tail, pools)
    by_chunk = out.reshape(B, n, K, size, G, U).swapaxes(2, 3)
    return by_chunk.reshape(B, n * size, K, G, U)[:, :T]


def max_chunk_rows(K: int, H: int, U: int, itemsize: int) -> int:
    """Return the most rows of a product. Queries and outputs of two chunks, and the sums, must fit in vector
    memory."""
    row_bytes = 2 * (H + U) * itemsize + (2 * LANES + U) * 4
    return min(MAX_PRODUCT_QUERIES, min(MAX_CHUNK_ROWS, MAX_HELD_BYTES // row_bytes) // K)


def queries_by_chunk(q: Float[Array, "B T K G H"], size: int) -> Float[Array, "chunks K R H"]:
    """Reshape queries to chunks of `size` tokens. Tokens past the last are zeros."""
    B, T, K, G, H = q.shape
    n = pl.cdiv(T, size)
    chunks = jnp.pad(q, ((0, 0), (0, n * size - T), (0, 0), (0, 0), (0, 0))).reshape(B * n, size, K, G, H)
    return chunks.swapaxes(1, 2).reshape(B * n, K, size * G, H)


def vector_memory_spec(x: Any, is_chunked: bool) -> pl.BlockSpec:
    """Return the BlockSpec of an array in vector memory: one chunk of it if `is_chunked`, else all of it."""
    if is_chunked:
        return pl.BlockSpec((1, *x.shape[1:]), lambda chunk, *_: (chunk, *(0,) * (x.ndim - 1)))
    return pl.BlockSpec(x.shape, lambda chunk, *_: (0,) * x.ndim)


def plan_chunks(pages: LayerPages, size: int, n: int, attention: AttentionParams) -> Chunks:
    """Plan the n chunks of each row, with `size` tokens each."""
    first = pages.start[:, None] + size * jnp.arange(n, dtype=jnp.int32)[None]
    low, end = visible_range(pages.start[:, None], pages.count[:, None], first, size, attention)
    paged_end = end if pages.tail is None else jnp.minimum(end, pages.tail[2][:, None])
    first, low, end, paged_end = (x.reshape(-1) for x in (first, low, end, paged_end))
    none = jnp.int32(len(end))
    chunk_numbers = jnp.append(jnp.where(end > 0, jnp.arange(len(end), dtype=jnp.int32), none), none)
    return Chunks(
        first, low, end, paged_end, jax.lax.cummin(chunk_numbers, reverse=True), pages.table.reshape(-1)
    )


def tail_kv(pages: LayerPages) -> tuple[Float[Array, "B K n H"], ...]:
    """Return the keys and values that replace the last of a row's, or nothing. Unused ones are zeros."""
    if pages.tail is None:
        return ()
    *tail, root = pages.tail
    place = jnp.arange(tail[0].shape[1], dtype=jnp.int32)
    is_read = (place[None] < (pages.start + pages.count - root)[:, None])[..., None, None]
    return tuple(jnp.where(is_read, x, 0).swapaxes(1, 2) for x in tail if x is not None)


def tpu_chunk_kernel(
    chunks: Chunks,
    q: Any,
    tokens: Any,
    sinks: Any,
    tail: Sequence[Any],
    pools: Sequence[Any],
    out: Any,
    buffers: Sequence[Any],
    semaphores: Any,
    next_buffer: Any,
    sums: Sums,
    *,
    chunks_per_row: int,
    attention: AttentionParams,
):
    """Attend with the queries of one chunk, block by block (kernel body). Its first block is copied while the
    previous chunk is computed."""
    chunk_number, S = pl.program_id(0), buffers[0].shape[2]
    first, low, end, paged_end = (x[chunk_number] for x in chunks[:4])
    copies = PageCopies(chunks, chunks_per_row, pools, buffers, semaphores)

    def first_block(chunk: Any) -> Any:
        return chunks.low[jnp.minimum(chunk, pl.num_programs(0) - 1)] // S

    def start_copies(chunk: Any, block: Any, buffer_index: Any) -> None:
        pl.when(chunk < pl.num_programs(0))(
            lambda: copies.visit_copies(lambda x: x.start(), chunk, block, buffer_index)
        )

    @pl.when(chunk_number == 0)
    def _() -> None:
        next_buffer[0] = 0
        start_copies(chunks.next_nonempty[0], first_block(chunks.next_nonempty[0]), 0)

    def attend_block(j: Any, _: Any) -> None:
        buffer_index, is_last = next_buffer[0], (j + 1) * S >= end
        next_buffer[0] = 1 - buffer_index
        following = jnp.where(is_last, chunks.next_nonempty[chunk_number + 1], chunk_number)
        start_copies(following, jnp.where(is_last, first_block(following), j + 1), 1 - buffer_index)
        copies.visit_copies(lambda x: x.wait(), chunk_number, j, buffer_index)

        def attend_tile(t: Any, _: Any) -> None:
            at = pl.ds(pl.multiple_of(t * TILE_TOKENS - j * S, TILE_TOKENS), TILE_TOKENS)
            parts = [buffer.at[buffer_index, :, at] for buffer in buffers]
            patch_edges(parts, tail, t * TILE_TOKENS, (low, end, paged_end))
            keys = t * TILE_TOKENS + jax.lax.broadcasted_iota(jnp.int32, (1, TILE_TOKENS), 1)
            # padding sees no more than the last token
            sees = attention.mask(jnp.minimum(first + repeat_lanes(tokens[...], TILE_TOKENS), end - 1), keys)
            add_tile(q.at[0], parts, sees, sums, attention)

        end_tile = pl.cdiv(jnp.minimum(end, (j + 1) * S), TILE_TOKENS)
        jax.lax.fori_loop(jnp.maximum(low, j * S) // TILE_TOKENS, end_tile, attend_tile, None)

    init_sums(sums, sinks)
    jax.lax.fori_loop(low // S, pl.cdiv(end, S), attend_block, None)
    for head in range(q.shape[1]):
        total = jnp.maximum(sums.total[head], 1e-30)
        out[0, head] = (sums.out[head] / repeat_lanes(total, out.shape[-1])).astype(out.dtype)


def patch_edges(parts: Sequence[Any], tail: Sequence[Any], first: Any, row: tuple[Any, Any, Any]) -> None:
    """Put the keys and values that replace a row's last into a tile, and zeros for values that no query sees.
    Pages may hold anything there. `parts` [K,S,H] begin at position `first`."""
    low, end, paged_end = row

    @pl.when((first < low) | (first + TILE_TOKENS > paged_end))
    def _() -> None:
        at = first + jax.lax.broadcasted_iota(jnp.int32, (TILE_TOKENS, 1), 0)
        for head in range(parts[0].shape[0]):
            for part, new in zip(parts, tail, strict=False):
                part[head] = jnp.where(at >= paged_end, gather_rows(at - paged_end, new[0, head]), part[head])
            values = parts[-1][head]
            parts[-1][head] = jnp.where((at >= low) & (at < end), values, jnp.zeros_like(values))


def gather_rows(index: Int[Array, "S 1"], x: Float[Array, "n H"]) -> Float[Array, "S H"]:
    """Return rows of x by index. The product with ones and zeros rounds nothing."""
    is_row = index == jax.lax.broadcasted_iota(jnp.int32, (1, len(x)), 1)
    return einsum("sn,nh->sh", is_row.astype(x.dtype), x, jnp.float32).astype(x.dtype)


def add_tile(
    q: Any, parts: Sequence[Any], sees: Bool[Array, "R S"], sums: Sums, attention: AttentionParams
) -> None:
    """Add a tile of keys to the running softmax of all key heads. Some heads are computed at once, so that
    their products overlap."""
    (K, S, _), (_, R, U) = parts[0].shape, sums.out.shape
    many = min(OVERLAPPED_HEADS, max(1, MAX_OVERLAPPED_ROWS // R))
    for first in range(0, K, many):
        heads = range(first, min(first + many, K))
        products = [einsum("rh,sh->rs", q[i], parts[0][i], jnp.float32) for i in heads]
        scores = [jnp.where(sees, attention.scores(x), MASK_VALUE) for x in products]
        tops = [
            jnp.maximum(sums.top[i], x.max(-1, keepdims=True)) for i, x in zip(heads, scores, strict=True)
        ]
        weights = [jnp.exp(x - repeat_lanes(top, S)) for x, top in zip(scores, tops, strict=True)]
        values = [parts[-1][i, :, :U] for i in heads]
        added = [
            einsum("rs,su->ru", w.astype(v.dtype), v, jnp.float32)
            for w, v in zip(weights, values, strict=True)
        ]
        for i, top, w, add in zip(heads, tops, weights, added, strict=True):
            fade = jnp.exp(sums.top[i] - top)
            sums.total[i] = sums.total[i] * fade + w.sum(-1, keepdims=True)
            sums.out[i] = sums.out[i] * repeat_lanes(fade, U) + add
            sums.top[i] = top


def broadcast_lanes(x: Shaped[Array, "*rows"]) -> Shaped[Array, "*rows LANES"]:
    """Broadcast numbers to all lanes of a register."""
    return jnp.broadcast_to(x[..., None], (*x.shape, LANES))


def repeat_lanes(x: Shaped[Array, "R LANES"], size: int) -> Shaped[Array, "R size"]:
    """Repeat numbers that are equal in all lanes to `size` lanes."""
    return jnp.tile(x, (1, size // LANES))


def init_sums(sums: Sums, sinks: Any) -> None:
    """Set the sums to their state before the first key: empty, or the sinks."""
    sums.top[...] = jnp.full(sums.top.shape, MASK_VALUE, jnp.float32) if sinks is None else sinks[...]
    sums.total[...] = jnp.full(sums.total.shape, 0.0 if sinks is None else 1.0, jnp.float32)
    sums.out[...] = jnp.zeros(sums.out.shape, jnp.float32)

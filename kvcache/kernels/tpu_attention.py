"""Attention of single tokens over pages on TPUs: a Pallas kernel (Mosaic) that reads pages where they lie.

A running softmax over tiles of keys, as in FlashAttention (Dao et al., arXiv 2205.14135). Rows go one after
the other. While the tiles of a block of pages are multiplied, the pages of the next block are copied into
vector memory, all key heads of a page at once, also those of the next row. Tiles begin at multiples of their
size, so a row's bits depend neither on its neighbours, nor on the page size, nor on the table's width.
Several tokens of a row, pools of 8 bits and selected keys are left to the reference.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import lcm
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jaxtyping import Array, Bool, Float, Int

from ...model.attention import UNSEEN, AttentionParams
from ...model.gpus import Kernel, may_use
from ...model.layers import einsum
from ..quantised import QuantisedPool
from .partitioned import by_each_device
from .tiles import LayerPages, cost, seen, value_size

LANES = 128  # numbers of a register's row
SUBLANES = 8  # rows of 32 bits
TILE = 256  # keys of one product
AT_ONCE = 8  # key heads whose products overlap
COPIED = 2 << 20  # bytes of keys and values that are copied at once, so that the copies' latency is hidden
MOST_COPIED = 24 << 20
VECTOR_MEMORY = 64 << 20
MOST_ENTRIES = 1 << 17  # of page tables in scalar memory
DECODE = Kernel("attention_decode", "tpu", "attention gathers pages")


class Rows(NamedTuple):
    """Single queries of the rows of a batch, in scalar memory: keys in [low, end) are read, those before
    `kept` from pages. `following[i]` is the first row from i on that reads any, or B. The table is flat."""

    low: Any  # int32 [B]
    end: Any  # int32 [B]
    kept: Any  # int32 [B]
    following: Any  # int32 [B+1]
    table: Any  # int32 [B*M]


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
    if q.shape[1] > 1 or (reading.expand is not None) != (reading.rank is not None):
        return False
    W, H = k.shape[2:]
    sizes = H % LANES, (reading.rank or 0) % LANES, W % (SUBLANES * 4 // k.dtype.itemsize)
    alike = k.shape == v.shape and k.dtype == v.dtype == q.dtype and k.dtype.name in ("bfloat16", "float32")
    small = 2 * block_size(pages) * token_bytes(pages) <= MOST_COPIED and pages.table.size <= MOST_ENTRIES
    return alike and not any(sizes) and small


def has_kernel(q: Any, pages: LayerPages, reading: AttentionParams) -> bool:
    return may_use(DECODE) and supported(q, pages, reading)


def token_bytes(pages: LayerPages) -> int:
    """Bytes of a token's keys and values."""
    return sum(x.shape[0] * x.shape[3] * x.dtype.itemsize for x in pages[:2] if x is not None)


def block_size(pages: LayerPages) -> int:
    """Tokens of the pages that are copied at once: whole pages and whole tiles."""
    least = lcm(pages.k.shape[2], TILE)
    return least * max(1, COPIED // (least * token_bytes(pages)))


def attend_pages(
    q: Float[Array, "B 1 N H"], pages: LayerPages, reading: AttentionParams, interpret: bool = False
) -> Float[Array, "B 1 N U"]:
    """Attention of the rows' tokens over their pages, in q's dtype; empty rows are zeros."""
    return by_each_device(one_query, q, pages, reading, interpret)


def one_query(
    q: Float[Array, "B 1 K G H"],
    pages: LayerPages,
    sinks: Float[Array, "K G"] | None,
    reading: AttentionParams,
    interpret: bool,
) -> Float[Array, "B 1 K G U"]:
    """The same of one device. Query heads of a key head are rows of one product, in whole registers."""
    (B, _, K, G, _), U = q.shape, value_size(q, reading)
    R, S = pl.cdiv(G, SUBLANES) * SUBLANES, block_size(pages)
    queries = jnp.pad(q[:, 0], ((0, 0), (0, 0), (0, R - G), (0, 0)))
    pools = tuple(pool for pool in pages[:2] if pool is not None)
    if sinks is not None:
        sinks = jnp.broadcast_to(jnp.pad(sinks, ((0, 0), (0, R - G)))[..., None], (K, R, LANES))
    own = own_keys(pages)
    each, whole = partial(a_row, whole=False), partial(a_row, whole=True)
    out = pl.pallas_call(
        partial(decode_kernel, reading=reading),
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B,),
            in_specs=(
                each(queries),
                jax.tree.map(whole, sinks),
                jax.tree.map(each, own),
                jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), pools),
            ),
            out_specs=pl.BlockSpec((1, K, R, U), lambda row, *_: (row, 0, 0, 0)),
            scratch_shapes=(
                tuple(tpu.VMEM((2, K, S, pool.shape[-1]), pool.dtype) for pool in pools),
                tpu.SemaphoreType.DMA((2, len(pools))),
                tpu.SMEM((1,), jnp.int32),
                Sums(*(tpu.VMEM((K, R, size), jnp.float32) for size in (LANES, LANES, U))),
            ),
        ),
        out_shape=jax.ShapeDtypeStruct((B, K, R, U), q.dtype),
        cost_estimate=cost(q, pages, reading),
        compiler_params=tpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VECTOR_MEMORY, disable_bounds_checks=True
        ),
        interpret=tpu.InterpretParams() if interpret else False,
        name="attend_token",
    )(rows_of(pages, reading), queries, sinks, own, pools)
    return out[:, None, :, :G]


def a_row(x: Any, whole: bool) -> pl.BlockSpec:
    """A row's part of an array [B,...], or all of an array, in vector memory."""
    if whole:
        return pl.BlockSpec(x.shape, lambda row, *_: (0,) * x.ndim)
    return pl.BlockSpec((1, *x.shape[1:]), lambda row, *_: (row, *(0,) * (x.ndim - 1)))


def rows_of(pages: LayerPages, reading: AttentionParams) -> Rows:
    low, end = seen(pages.start, pages.count, pages.start, 1, reading)
    B = len(end)
    each = jnp.append(jnp.where(end > 0, jnp.arange(B, dtype=jnp.int32), B), jnp.int32(B))
    kept = end if pages.own is None else jnp.minimum(end, pages.own[2])
    return Rows(low, end, kept, jax.lax.cummin(each, reverse=True), pages.table.reshape(-1))


def own_keys(pages: LayerPages) -> tuple[Float[Array, "B K n H"], ...]:
    """Keys and values that stand for the last of a row's, in whole registers, with zeros behind them; nothing
    if none do."""
    if pages.own is None:
        return ()
    *found, root = pages.own
    place = jnp.arange(found[0].shape[1], dtype=jnp.int32)
    is_read = (place[None] < (pages.start + pages.count - root)[:, None])[..., None, None]
    each = (jnp.where(is_read, x, 0).swapaxes(1, 2) for x in found if x is not None)
    return tuple(jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % (2 * SUBLANES)), (0, 0))) for x in each)


def decode_kernel(
    rows: Rows,
    q: Any,
    sinks: Any,
    own: Sequence[Any],
    pools: Sequence[Any],
    out: Any,
    buffers: Sequence[Any],
    arrived: Any,
    turn: Any,
    sums: Sums,
    *,
    reading: AttentionParams,
):
    """The query of a row: its blocks of keys, of which the first is copied while the row before is read."""
    row, S = pl.program_id(0), buffers[0].shape[2]
    low, end = rows.low[row], rows.end[row]
    copy = partial(copies, rows, pools, buffers, arrived)

    def first_block(row: Any) -> Any:
        return rows.low[jnp.minimum(row, pl.num_programs(0) - 1)] // S

    def begin(row: Any, block: Any, place: Any) -> None:
        pl.when(row < pl.num_programs(0))(lambda: copy(row, block, place, lambda x: x.start()))

    @pl.when(row == 0)
    def _() -> None:
        turn[0] = 0
        begin(rows.following[0], first_block(rows.following[0]), 0)

    def block(j: Any, _: Any) -> None:
        place, is_last = turn[0], (j + 1) * S >= end
        turn[0] = 1 - place
        following = jnp.where(is_last, rows.following[row + 1], row)
        begin(following, jnp.where(is_last, first_block(following), j + 1), 1 - place)
        copy(row, j, place, lambda x: x.wait())

        def tile(t: Any, _: Any) -> None:
            at = pl.ds(pl.multiple_of(t * TILE - j * S, TILE), TILE)
            parts = [buffer.at[place, :, at] for buffer in buffers]
            lay_edges(parts, own, t * TILE, (low, end, rows.kept[row]))
            keys = t * TILE + jax.lax.broadcasted_iota(jnp.int32, (1, TILE), 1)
            add_tile(q.at[0], parts, reading.sees(end - 1, keys) & (keys < end), sums, reading)

        jax.lax.fori_loop(
            jnp.maximum(low, j * S) // TILE, pl.cdiv(jnp.minimum(end, (j + 1) * S), TILE), tile, None
        )

    before_any_key(sums, sinks)
    jax.lax.fori_loop(low // S, pl.cdiv(end, S), block, None)
    for head in range(q.shape[1]):
        total = jnp.maximum(sums.total[head], 1e-30)
        out[0, head] = (sums.out[head] / over_lanes(total, out.shape[-1])).astype(out.dtype)


def copies(
    rows: Rows,
    pools: Sequence[Any],
    buffers: Sequence[Any],
    arrived: Any,
    row: Any,
    block: Any,
    place: Any,
    act: Callable[[Any], None],
) -> None:
    """Start the copies of the pages of a block of a row into one of two places, or wait for them."""
    W, S, B = pools[0].shape[2], buffers[0].shape[2], rows.low.shape[0]
    first, M = block * (S // W), rows.table.shape[0] // B

    def page(i: Any, _: Any) -> None:
        at = pl.ds(pl.multiple_of((i - first) * W, W), W)
        for n, (pool, buffer) in enumerate(zip(pools, buffers, strict=True)):
            source = pool.at[:, rows.table[row * M + i]]
            act(tpu.make_async_copy(source, buffer.at[place, :, at], arrived.at[place, n]))

    until = jnp.minimum(pl.cdiv(rows.kept[row], W), first + S // W)
    jax.lax.fori_loop(jnp.maximum(rows.low[row] // W, first), until, page, None)


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
    q: Any, parts: Sequence[Any], sees: Bool[Array, "1 S"], sums: Sums, reading: AttentionParams
) -> None:
    """Take the running softmax of all key heads on by a tile of keys; some heads at once, whose products then
    overlap."""
    (K, S, _), U = parts[0].shape, sums.out.shape[-1]
    for first in range(0, K, AT_ONCE):
        heads = range(first, min(first + AT_ONCE, K))
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


def over_lanes(x: Float[Array, "R LANES"], size: int) -> Float[Array, "R size"]:
    """Numbers that are the same in all lanes, in as many lanes."""
    return jnp.tile(x, (1, size // LANES))


def before_any_key(sums: Sums, sinks: Any) -> None:
    """The running softmax at the start: nothing, or the sinks."""
    sums.top[...] = jnp.full(sums.top.shape, UNSEEN, jnp.float32) if sinks is None else sinks[...]
    sums.total[...] = jnp.full(sums.total.shape, 0.0 if sinks is None else 1.0, jnp.float32)
    sums.out[...] = jnp.zeros(sums.out.shape, jnp.float32)

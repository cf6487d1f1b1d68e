"""Attention over pages on NVIDIA GPUs: Pallas kernels (Triton backend) that read pages where they lie.

A running softmax over tiles of keys, as in FlashAttention (Dao et al., arXiv 2205.14135); the query heads of
a key head are rows of one product. A single query's keys are split into parts that a second kernel adds up
(flash-decoding, Dao et al., 2023); several queries go in tiles of their own. Tiles of keys begin at multiples
of TILE and a row's parts follow from its own length, so bits depend neither on neighbours, nor on the page
size, nor on the widths of table and chunk.

The backend is deprecated since jax 0.11. The engine uses `attend_with` and `Pages` alone.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import triton
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, Shaped

from ..model.attention import MASKED, Reading
from ..model.layers import einsum

HEAD_SIZES = (32, 64, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")
MOST_GROUPED = 32  # query heads of a key head
TILE = 64  # keys of one product
PART = 4  # tiles of a part at least
PARTS = 32  # parts of a row at most
SMALL = 16  # rows of a tensor core's product at least
Given = Array | jax.ShapeDtypeStruct  # arrays or shapes
# of each query: its highest score, its total, and its weighted values
Running = tuple[Float[Array, " rows"], Float[Array, " rows"], Float[Array, "rows H"]]


class Pages(NamedTuple):
    """A layer's pools [K,P,W,H], the rows' pages [B,M], where their T tokens begin [B], and how many are real
    [B].

    `own` is for single tokens: keys and values [B,n,K,H] that stand for the last of a row's, from a position
    [B] on.
    """

    k: Any
    v: Any
    table: Any
    start: Any
    count: Any
    own: tuple[Any, Any, Any] | None = None


class Queries(NamedTuple):
    """Queries of one key head, the rows of a kernel's products; keys in [low, end) are read."""

    row: Any  # of the batch
    head: Any  # the key head
    token: Any  # int32 [rows]
    member: Any  # int32 [rows], the query head among those of the key head
    real: Any  # bool [rows]
    pos: Any  # int32 [rows]
    low: Any
    end: Any


@cache
def compiles_for_gpus() -> bool:
    """Whether jax has a compiler for NVIDIA GPUs; without one the kernels need not even be traced."""
    return any(find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))


def supported(
    q: Shaped[Given, "B T N _"],
    k: Shaped[Given, "K P W H"],
    v: Shaped[Given, "K P W _"] | None,
    reading: Reading,
) -> bool:
    """Whether the kernels read these queries and pools."""
    return (
        v is not None
        and reading.expand is None
        and q.shape[-1] == k.shape[-1] == v.shape[-1]
        and q.shape[-1] in HEAD_SIZES
        and q.shape[2] // k.shape[0] <= MOST_GROUPED
        and q.dtype == k.dtype == v.dtype
        and q.dtype.name in DTYPES
    )


def attend_with(
    q: Float[Array, "B T N H"],
    pools: tuple[Shaped[Array, "K P W _"], Shaped[Array, "K P W _"] | None],
    reading: Reading,
    pages: Callable[[], Pages],
    reference: Callable[[Float[Array, "B T N H"]], Float[Array, "B T N U"]],
) -> Float[Array, "B T N U"]:
    """Attention by the kernels on an NVIDIA GPU that can, elsewhere by the reference, in q's dtype."""

    def plainly(q: Float[Array, "B T N H"]) -> Float[Array, "B T N U"]:
        return reference(q).astype(q.dtype)

    if not (compiles_for_gpus() and supported(q, *pools, reading)):
        return plainly(q)
    return jax.lax.platform_dependent(q, cuda=lambda q: attend_pages(q, pages(), reading), default=plainly)


def attend_pages(
    q: Float[Array, "B T N H"], pages: Pages, reading: Reading, interpret: bool = False
) -> Float[Array, "B T N H"]:
    """Attention of the rows' tokens over their pages, in q's dtype; empty rows give zeros."""
    B, T, N, H = q.shape
    K = pages.k.shape[0]
    sinks = None if reading.sinks is None else reading.sinks.astype(jnp.float32).reshape(K, N // K)
    plain = Reading(reading.scale, reading.window, reading.softcap)
    return grouped_attention(q.reshape(B, T, K, N // K, H), pages, sinks, plain, interpret).reshape(q.shape)


@partial(custom_partitioning, static_argnums=(3, 4))
def partitioned_attention(
    q: Float[Array, "B T K G H"],
    pages: Pages,
    sinks: Float[Array, "K G"] | None,
    reading: Reading,
    interpret: bool,
) -> Float[Array, "B T K G H"]:
    return (many_queries if q.shape[1] > 1 else one_query)(q, pages, sinks, reading, interpret)


def on_each_device(reading: Reading, interpret: bool, mesh: Any, shapes: Any, result: Any) -> Any:
    """Every device of a mesh reads the key heads whose pools it holds."""
    spec = shapes[1].k.sharding.spec
    axis = spec[0] if len(spec) else None
    pool, heads, whole = (NamedSharding(mesh, PartitionSpec(*s)) for s in ((axis,), (None, None, axis), ()))
    own = None if shapes[1].own is None else (heads, heads, whole)
    places = heads, Pages(pool, pool, whole, whole, whole, own), None if shapes[2] is None else pool
    local = partial(partitioned_attention.fun, reading=reading, interpret=interpret)
    return mesh, local, heads, places


def axes(reading: Reading, interpret: bool, mesh: Any, values: Any, results: Any) -> str:
    """Which axes the operands, optional ones too, have in common: XLA's partitioner is told by letters."""
    own = ["b n k h", "b n k h", "b"] if len(values) > 8 else []
    sinks = ["k g"] if len(values) % 3 == 1 else []
    return ", ".join(["b t k g h", "k p w h", "k p w h", "b m", "b", "b", *own, *sinks]) + " -> b t k g h"


partitioned_attention.def_partition(on_each_device, sharding_rule=axes)
grouped_attention = jax.jit(partitioned_attention, static_argnums=(3, 4))  # layers share one trace


def settings(q: Float[Array, "B T K G H"], rows: int, interpret: bool) -> dict[str, Any]:
    """How a kernel with products of so many rows is compiled. Wide heads leave room for fewer stages."""
    stages = 3 if q.shape[-1] * q.dtype.itemsize <= 256 else 2
    params = triton.CompilerParams(num_warps=8 if rows > 64 else 4, num_stages=stages)
    return {"compiler_params": params, "interpret": interpret}


# ---------------------------------------------------------------- several queries a row


def many_queries(
    q: Float[Array, "B T K G H"],
    pages: Pages,
    sinks: Float[Array, "K G"] | None,
    reading: Reading,
    interpret: bool,
) -> Float[Array, "B T K G H"]:
    """Tiles of queries, each by itself, the last ones first: they read the most."""
    B, T, K, G, H = q.shape
    rows = max(SMALL, pl.next_power_of_2(G), 256 // q.dtype.itemsize // max(1, H // 128))
    return pl.pallas_call(
        partial(chunk_kernel, rows=rows, reading=reading),
        grid=(pl.cdiv(T, rows // pl.next_power_of_2(G)), K, B),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        cost_estimate=cost(q, pages, T / 2, reading),
        name="attend_chunk",
        **settings(q, rows, interpret),
    )(q, pages, sinks)


def chunk_kernel(q: Any, pages: Pages, sinks: Any, out: Any, *, rows: int, reading: Reading):
    tile = pl.num_programs(0) - 1 - pl.program_id(0)
    at = queries_of(q, pages, rows, (pl.program_id(2), pl.program_id(1), tile), reading.window)
    before = no_keys(at, sinks, q.shape[-1])
    _, total, found = over_keys(q, pages, at, (at.low // TILE, pl.cdiv(at.end, TILE)), before, reading)
    store(out, at.row, at.token, at.head, at.member, value=quotient(found, total), mask=at.real)


# ---------------------------------------------------------------- one query a row


def one_query(
    q: Float[Array, "B 1 K G H"],
    pages: Pages,
    sinks: Float[Array, "K G"] | None,
    reading: Reading,
    interpret: bool,
) -> Float[Array, "B 1 K G H"]:
    """Parts of the keys, then their sum."""
    B, _, K, G, H = q.shape
    parts = min(PARTS, pl.cdiv(most_tiles(pages, reading), PART))
    sums = [jax.ShapeDtypeStruct((B, K, parts, G, *last), jnp.float32) for last in ((), (), (H,))]
    rows = max(SMALL, pl.next_power_of_2(G))
    found = pl.pallas_call(
        partial(part_kernel, rows=rows, reading=reading),
        grid=(B, K, parts),
        out_shape=sums,
        cost_estimate=cost(q, pages, 0, reading),
        name="attend_part",
        **settings(q, rows, interpret),
    )(q, pages)
    return pl.pallas_call(
        partial(sum_kernel, rows=pl.next_power_of_2(G), window=reading.window),
        grid=(B, K),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        name="attend_sum",
        **settings(q, rows, interpret),
    )(Pages(None, None, None, pages.start, pages.count), sinks, *found)


def most_tiles(pages: Pages, reading: Reading) -> int:
    """Tiles that one query sees at most."""
    held = pl.cdiv(pages.table.shape[1] * pages.k.shape[2], TILE)
    return held if reading.window is None else min(held, pl.cdiv(reading.window - 1, TILE) + 1)


def parts_of(at: Queries) -> tuple[Any, Any, Any]:
    """First tile of a single query, its number of tiles, and that of one part."""
    first = at.low // TILE
    tiles = jnp.maximum(pl.cdiv(at.end, TILE) - first, 0)
    return first, tiles, jnp.maximum(pl.cdiv(tiles, PARTS), PART)


def part_kernel(q: Any, pages: Pages, *sums: Any, rows: int, reading: Reading):
    row, head, part = (pl.program_id(axis) for axis in range(3))
    at = queries_of(q, pages, rows, (row, head, 0), reading.window)
    first, tiles, size = parts_of(at)
    begin, end = part * size, jnp.minimum((part + 1) * size, tiles)

    @pl.when(begin < end)
    def _():
        before = no_keys(at, None, q.shape[-1])
        found = over_keys(q, pages, at, (first + begin, first + end), before, reading)
        for ref, value in zip(sums, found, strict=True):
            store(ref, row, head, part, at.member, value=value, mask=at.real)


def sum_kernel(pages: Pages, sinks: Any, *refs: Any, rows: int, window: int | None):
    *sums, out = refs
    at = queries_of(out, pages, rows, (pl.program_id(0), pl.program_id(1), 0), window)
    _, tiles, size = parts_of(at)

    def add(part: Any, state: Any) -> Any:
        return joined(state, [of_members(ref, at, at.row, at.head, part) for ref in sums])

    before = no_keys(at, sinks, out.shape[-1])
    _, total, found = jax.lax.fori_loop(0, pl.cdiv(tiles, size), add, before)
    store(out, at.row, at.token, at.head, at.member, value=quotient(found, total), mask=at.real)


# ---------------------------------------------------------------- inside a kernel


def queries_of(q: Any, pages: Pages, rows: int, place: tuple[Any, Any, Any], window: int | None) -> Queries:
    """The queries of a row of the batch, a key head, and a tile of tokens."""
    (_, T, _, G, _), (row, head, tile) = q.shape, place
    group = pl.next_power_of_2(G)
    member = jnp.arange(rows, dtype=jnp.int32)
    token, member = tile * (rows // group) + member // group, member % group
    start, count = pages.start[row], pages.count[row]
    first = start + tile * (rows // group)
    low = 0 * first if window is None else jnp.maximum(first - (window - 1), 0)
    # no key is read for a tile without tokens
    end = jnp.where(first < start + count, jnp.minimum(start + count, first + rows // group), 0)
    real = (token < T) & (member < G)
    return Queries(row, head, token, jnp.where(real, member, G), real, start + token, low, end)


def over_keys(
    q: Any, pages: Pages, at: Queries, tiles: tuple[Any, Any], before: Any, reading: Reading
) -> Running:
    """The running softmax of the queries over some tiles of keys."""
    rows = q[
        at.row, jnp.minimum(at.token, q.shape[1] - 1), at.head, jnp.minimum(at.member, q.shape[3] - 1), :
    ]

    def tile(j: Any, state: Any) -> Any:
        keys = j * TILE + jnp.arange(TILE, dtype=jnp.int32)
        k, v = load_keys(pages, at, keys)
        scores = reading.scores(einsum("qh,sh->qs", rows, k, jnp.float32))
        scores = jnp.where(reading.sees(at.pos[:, None], keys[None]), scores, MASKED)
        top, total, out = state
        new_top = jnp.maximum(top, scores.max(-1))
        fade, weights = jnp.exp(top - new_top), jnp.exp(scores - new_top[:, None])
        add = einsum("qs,sh->qh", weights.astype(v.dtype), v, jnp.float32)
        return new_top, total * fade + weights.sum(-1), out * fade[:, None] + add

    return jax.lax.fori_loop(*tiles, tile, before)


def load_keys(
    pages: Pages, at: Queries, keys: Int[Array, " S"]
) -> tuple[Float[Array, "S H"], Float[Array, "S H"]]:
    """Keys and values of positions, or of the nearest ones that are seen: others may hold anything."""
    W, keys = pages.k.shape[2], jnp.clip(keys, at.low, at.end - 1)
    if pages.own is None:
        page = pages.table[at.row, keys // W]
        return pages.k[at.head, page, keys % W, :], pages.v[at.head, page, keys % W, :]
    *own, root = pages.own
    place, old = keys - root[at.row], jnp.maximum(jnp.minimum(keys, root[at.row] - 1), 0)
    page, late = pages.table[at.row, old // W], (place >= 0)[:, None]
    place = jnp.maximum(place, 0)
    k, v = (
        jnp.where(late, new[at.row, place, at.head, :], pool[at.head, page, old % W, :])
        for new, pool in zip(own, pages[:2], strict=True)
    )
    return k, v


def no_keys(at: Queries, sinks: Any, H: int) -> Running:
    """The running softmax before any key: nothing, or the sinks."""
    rows = at.token.shape[0]
    out = jnp.zeros((rows, H), jnp.float32)
    if sinks is None:
        return jnp.full(rows, MASKED, jnp.float32), jnp.zeros(rows, jnp.float32), out
    return of_members(sinks, at, at.head), jnp.ones(rows, jnp.float32), out


def of_members(ref: Any, at: Queries, *place: Any) -> Float[Array, "rows ..."]:
    """What a reference [..., G] or [..., G, H] has at a place for each query."""
    group = ref.shape[len(place)]
    return ref[(*place, jnp.minimum(at.member, group - 1), *(slice(None),) * (ref.ndim - len(place) - 1))]


def joined(one: Running, other: Sequence[Float[Array, "rows ..."]]) -> Running:
    """The running softmax over the keys of two."""
    top = jnp.maximum(one[0], other[0])
    a, b = jnp.exp(one[0] - top), jnp.exp(other[0] - top)
    return top, one[1] * a + other[1] * b, one[2] * a[:, None] + other[2] * b[:, None]


def quotient(out: Float[Array, "rows H"], total: Float[Array, " rows"]) -> Float[Array, "rows H"]:
    return out / jnp.maximum(total, 1e-30)[:, None]


def store(ref: Any, *index: Any, value: Float[Array, "rows ..."], mask: Bool[Array, " rows"]):
    """Write numbers or heads of rows at vectors of indices, but those masked out."""
    if value.ndim > 1:  # interpreted stores do not mix vectors and slices
        index = (
            *(i[:, None] if jnp.ndim(i) else i for i in index),
            jnp.arange(value.shape[1], dtype=jnp.int32)[None],
        )
        mask = jnp.broadcast_to(mask[:, None], value.shape)
    triton.store(ref.at[index], value.astype(ref.dtype), mask=mask)


def cost(q: Float[Array, "B T K G H"], pages: Pages, new: float, reading: Reading) -> pl.CostEstimate:
    """Operations and bytes of a full table, or window, and half of the new tokens: lengths are not known."""
    B, T, K, G, H = q.shape
    seen = most_tiles(pages, reading) * TILE + (new if reading.window else -new)
    pairs = int(B * T * K * G * max(seen, 1))
    moved = 2 * B * K * seen * H + 2 * q.size
    return pl.CostEstimate(
        flops=4 * H * pairs, transcendentals=pairs, bytes_accessed=int(moved) * q.dtype.itemsize
    )

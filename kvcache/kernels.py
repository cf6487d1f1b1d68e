"""Attention over pages on NVIDIA GPUs: Pallas kernels (Triton backend) that read pages where they lie.

A running softmax over tiles of keys, as in FlashAttention (Dao et al., arXiv 2205.14135); the query heads of
a key head are rows of one product. A single query's keys are split into parts that a second kernel adds up
(flash-decoding, Dao et al., 2023); several queries go in tiles of their own. Tiles of keys begin at multiples
of TILE and a row's parts follow from its own length, so bits depend neither on neighbours, nor on the page
size, nor on the widths of table and chunk.

The backend is deprecated since jax 0.11. The engine uses `attend_with` and `Pages` alone.
"""

from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.pallas import triton
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Shaped

from ..model.attention import Reading
from .tiles import TILE, Pages, Queries, added, no_keys, of_members, over_keys, queries_of, quotient, store

HEAD_SIZES = (32, 64, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")
MOST_GROUPED = 32  # query heads of a key head
PART = 4  # tiles of a part at least
PARTS = 32  # parts of a row at most
SMALL = 16  # rows of a tensor core's product at least
Given = Array | jax.ShapeDtypeStruct  # arrays or shapes


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
    """Attention of the rows' tokens over their pages, in q's dtype; empty rows are zeros."""
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
    """The sharding rule for XLA's partitioner: the axes that operands, also optional ones, share."""
    own = ["b n k h", "b n k h", "b"] if len(values) > 8 else []
    sinks = ["k g"] if len(values) % 3 == 1 else []
    return ", ".join(["b t k g h", "k p w h", "k p w h", "b m", "b", "b", *own, *sinks]) + " -> b t k g h"


partitioned_attention.def_partition(on_each_device, sharding_rule=axes)
grouped_attention = jax.jit(partitioned_attention, static_argnums=(3, 4))  # layers share one trace


def settings(q: Float[Array, "B T K G H"], rows: int, interpret: bool) -> dict[str, Any]:
    """How a kernel with products of `rows` rows is compiled. Wide heads leave room for fewer stages."""
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
        return added(state, [of_members(ref, at, at.row, at.head, part) for ref in sums])

    before = no_keys(at, sinks, out.shape[-1])
    _, total, found = jax.lax.fori_loop(0, pl.cdiv(tiles, size), add, before)
    store(out, at.row, at.token, at.head, at.member, value=quotient(found, total), mask=at.real)


def cost(q: Float[Array, "B T K G H"], pages: Pages, new: float, reading: Reading) -> pl.CostEstimate:
    """Operations and bytes of a full table, or window, and half of the new tokens: lengths are not known."""
    B, T, K, G, H = q.shape
    seen = most_tiles(pages, reading) * TILE + (new if reading.window else -new)
    pairs = int(B * T * K * G * max(seen, 1))
    moved = 2 * B * K * seen * H + 2 * q.size
    return pl.CostEstimate(
        flops=4 * H * pairs, transcendentals=pairs, bytes_accessed=int(moved) * q.dtype.itemsize
    )

"""Attention over pages on NVIDIA GPUs: Pallas kernels (Triton backend) that read pages where they lie.

A running softmax over tiles of keys, as in FlashAttention (Dao et al., arXiv 2205.14135); the query heads of
a key head are rows of one product. A single query's keys are split into parts that a second kernel adds up
(flash-decoding, Dao et al., 2023); a fixed number of blocks deals the parts of all rows out among itself, so
that work follows the rows' lengths (as in Stream-K, Osama et al., arXiv 2301.03598). Several queries go in
tiles of their own. Tiles of keys begin at multiples of their size and a row's parts follow from its own
length, so bits depend neither on neighbours, nor on the page size, nor on the widths of table and chunk.
The backend is deprecated since jax 0.11. On Hopper GPUs another kernel attends to prompts
(`hopper_attention.py`). The engine uses `attend_with`, `has_kernel` and `LayerPages` alone.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int, Shaped

from ...model.attention import AttentionParams
from ...model.gpus import Kernel, gpu, refusal
from ..pages import in_lanes
from ..quantised import SCALE, QuantisedPool
from . import cpu_attention, hopper_attention, tpu_attention
from .partitioned import LocalAttention, by_each_device
from .tiles import (
    TILE,
    LayerPages,
    add_parts,
    cost,
    no_keys,
    over_keys,
    queries_of,
    quotient,
    seen,
    store,
    tile_of,
    value_size,
)

HEAD_SIZES = range(16, 257, 16)  # of keys and values
LATENTS = range(16, 513, 16)
TURNED = range(16, 129, 16)  # of latent rows
DTYPES = ("bfloat16", "float16", "float32")
MOST_GROUPED = 32  # query heads of a key head
MOST_LATENT = 128  # query heads of a latent layer
PROCESSORS = 132  # of an H100 or an H200
SMALL = 16  # rows of a tensor core's product at least
MOST_ROWS = 64  # of a single token's product
FEW_ROWS = 32  # of a latent layer's where a block has less shared memory than MOST_ROWS ask for
ADDED = 32  # parts that are added at once at most
SUMMED = 8192  # their numbers
Given = Array | jax.ShapeDtypeStruct  # arrays or shapes
GivenPool = Shaped[Given, "K P W _"] | QuantisedPool
Split = Callable[[Any, Any], tuple[Any, Any, Any]]  # of ranges of keys, as `parts_of`
DECODE = Kernel("attention_decode", "triton", "attention gathers pages")
PREFILL = Kernel("attention_prefill", "triton", "attention gathers pages")
LATENT = Kernel("latent_decode", "triton", "latent attention gathers pages")
LATENT_PREFILL = Kernel("latent_prefill", "triton", "latent attention makes keys and values of pages")
# Bytes of shared memory that a block asks for with all of its stages, where some GPUs have less: by kernel,
# bytes of a number, and size of a head as a power of two. Compiled with jax 0.10.2.
ASKED = {
    (PREFILL.name, 2, 256): 107_008,
    (PREFILL.name, 4, 256): 172_160,
    (DECODE.name, 4, 256): 151_616,
}
ASKED_BY_LATENTS = 115_200  # of 512 and a turned key of 64: with MOST_ROWS rows, or SMALL of float32


def supported(
    q: Shaped[Given, "B T N _"], k: GivenPool, v: GivenPool | None, reading: AttentionParams
) -> bool:
    (*_, N, H), K = q.shape, k.shape[0]
    chosen, pools = reading.selection is not None, (k, v)
    readable = not chosen and all(pool is None or keeps_numbers(pool, q.dtype) for pool in pools)
    H += 0 if reading.turned is None else reading.turned.shape[-1]
    same = k.shape[-1] == H and readable and q.dtype.name in DTYPES
    if reading.rank is not None:
        sizes = reading.rank in LATENTS and H - reading.rank in TURNED
        return same and sizes and K == 1 and N <= MOST_LATENT
    if v is None or reading.expand is not None:
        return False
    return same and v.shape == k.shape and H in HEAD_SIZES and N // K <= MOST_GROUPED


def has_kernel(
    q: Shaped[Given, "B T N _"], pools: tuple[GivenPool, GivenPool | None], reading: AttentionParams
) -> bool:
    """True if a kernel attends in programs for the GPU that is compiled for."""
    by_triton = supported(q, *pools, reading) and refusal_of(q, *pools, reading) is None
    return by_triton or hopper_attention.has_kernel(q, *pools, reading)


def refusal_of(
    q: Shaped[Given, "B T N _"], k: GivenPool, v: GivenPool | None, reading: AttentionParams
) -> str | None:
    """Return why the GPU that is compiled for cannot run the kernel of a layer that is `supported`, or
    None."""
    own = kernel_of(q.shape[1], reading)
    return refusal(own, least_memory(own, q, k, reading), {pool.dtype for pool in jax.tree.leaves((k, v))})


def kernel_of(T: int, reading: AttentionParams) -> Kernel:
    """The kernel that attends with T queries of a row."""
    one, several = (DECODE, PREFILL) if reading.rank is None else (LATENT, LATENT_PREFILL)
    return one if T == 1 else several


def memory_asked(kernel: Kernel, H: int, dtype: Any) -> int:
    """Bytes of shared memory that a block asks for with all of its stages; 0 if every GPU has them."""
    return ASKED.get((kernel.name, dtype.itemsize, pl.next_power_of_2(H)), 0)


def least_memory(kernel: Kernel, q: Shaped[Given, "B T N _"], k: GivenPool, reading: AttentionParams) -> int:
    """Bytes that it asks for with one stage: of a tile of queries, of keys and of values; 0 if every GPU has
    them."""
    (_, T, N, _), (K, *_, H), dtype = q.shape, k.shape, q.dtype
    if reading.rank is not None:
        return ASKED_BY_LATENTS if dtype.itemsize == 4 else 0
    if not memory_asked(kernel, H, dtype):
        return 0
    G = pl.next_power_of_2(N // K)
    rows = rows_of_chunk(G, H, dtype, reading) if T > 1 else min(MOST_ROWS, max(SMALL, G))
    return (rows + 2 * TILE) * pl.next_power_of_2(H) * dtype.itemsize


def keeps_numbers(pool: GivenPool, dtype: Any) -> bool:
    """True if a pool holds numbers, or scales, of this dtype; on a CPU it holds their bits."""
    return pool.scales.dtype == SCALE if isinstance(pool, QuantisedPool) else pool.dtype == dtype


def attend_with(
    q: Float[Array, "B T N H"],
    pages: LayerPages,
    reading: AttentionParams,
    reference: Callable[[Float[Array, "B T N H"]], Float[Array, "B T N U"]],
    isa: str | None = None,
) -> Float[Array, "B T N U"]:
    """Attention by the kernels on an NVIDIA GPU that can, by that of a TPU, or on a CPU by those of an
    instruction set; elsewhere by the reference, in q's dtype."""

    def plainly(q: Float[Array, "B T N H"]) -> Float[Array, "B T N U"]:
        whole = q if reading.turned is None else jnp.concatenate([q, reading.turned], axis=-1)
        return reference(whole).astype(q.dtype)

    kernels: dict[str, Callable[[Any], Any]] = {}
    if tpu_attention.has_kernel(q, pages, reading):
        by_kernel = partial(tpu_attention.attend_pages, pages=pages, reading=reading)
        kernels["tpu"] = lambda q: in_lanes(by_kernel, q, pages.k, reading.heads)
    if has_kernel(q, pages[:2], reading):
        kernels["cuda"] = lambda q: attend_pages(q, pages, reading)
    if isa is not None and cpu_attention.supported(q, *pages[:2], reading):
        kernels["cpu"] = lambda q: cpu_attention.attend_pages(q, pages, reading, isa)
    return jax.lax.platform_dependent(q, **kernels, default=plainly) if kernels else plainly(q)


def attend_pages(
    q: Float[Array, "B T N H"], pages: LayerPages, reading: AttentionParams, interpret: bool = False
) -> Float[Array, "B T N U"]:
    """Attention of the rows' tokens over their pages, in q's dtype; empty rows are zeros."""
    return by_each_device(chosen(q, pages, reading, interpret), q, pages, reading, interpret)


def chosen(
    q: Shaped[Given, "B T N H"], pages: LayerPages, reading: AttentionParams, interpret: bool
) -> LocalAttention:
    """The kernel for a single query of each row, or for several: Mosaic's where it can, else Triton's."""
    if q.shape[1] == 1:
        return one_query
    can = not interpret and hopper_attention.has_kernel(q, *pages[:2], reading)
    return hopper_attention.many_queries if can else many_queries


def settings(
    q: Float[Array, "B T K G H"], rows: int, reading: AttentionParams, interpret: bool
) -> dict[str, Any]:
    """Compiler settings of a kernel with products of `rows` rows. Wide heads leave room for fewer stages,
    which change no bits."""
    stages, here = 3 if pl.next_power_of_2(q.shape[-1]) * q.dtype.itemsize <= 256 else 2, gpu()
    if here and memory_asked(kernel_of(q.shape[1], reading), q.shape[-1], q.dtype) > here.shared_memory:
        stages = 1
    many = rows > 64 if reading.rank is None else rows > 16
    params = triton.CompilerParams(num_warps=8 if many else 4, num_stages=stages)
    return {"compiler_params": params, "interpret": interpret}


# ---------------------------------------------------------------- several queries a row


def many_queries(
    q: Float[Array, "B T K G H"],
    pages: LayerPages,
    sinks: Float[Array, "K G"] | None,
    reading: AttentionParams,
    interpret: bool,
) -> Float[Array, "B T K G U"]:
    """Tiles of queries, each by itself, the last ones first: they read the most."""
    B, T, K, G, H = q.shape
    rows = rows_of_chunk(G, H, q.dtype, reading)
    tokens, groups = max(1, rows // pl.next_power_of_2(G)), pl.cdiv(G, rows)
    return pl.pallas_call(
        partial(chunk_kernel, rows=rows, reading=reading),
        grid=(pl.cdiv(T, tokens), K * groups, B),
        out_shape=jax.ShapeDtypeStruct((B, T, K, G, value_size(q, reading)), q.dtype),
        cost_estimate=cost(q, pages, reading),
        name="attend_chunk",
        **settings(q, rows, reading, interpret),
    )(q, pages, sinks)


def rows_of_chunk(G: int, H: int, dtype: Any, reading: AttentionParams) -> int:
    """Rows of a tile of queries; a latent layer's many heads are several tiles."""
    if reading.rank is not None:
        return most_rows(reading, dtype)
    # with 64 rows of wide heads two blocks share a multiprocessor
    most = 2 * MOST_ROWS if pl.next_power_of_2(H) < 128 else MOST_ROWS
    return max(SMALL, pl.next_power_of_2(G), 2 * most // dtype.itemsize)


def chunk_kernel(q: Any, pages: LayerPages, sinks: Any, out: Any, *, rows: int, reading: AttentionParams):
    tile, groups = pl.num_programs(0) - 1 - pl.program_id(0), pl.cdiv(q.shape[3], rows)
    head, group = pl.program_id(1) // groups, pl.program_id(1) % groups
    at = queries_of(q, pages, rows, (pl.program_id(2), head, tile, group), reading)
    before, size = no_keys(at, sinks, out.shape[-1]), tile_of(reading)
    _, total, found = over_keys(q, pages, at, (at.low // size, pl.cdiv(at.end, size)), before, reading)
    store(out, at.row, at.token, at.head, at.member, value=quotient(found, total), mask=at.real)


# ---------------------------------------------------------------- one query a row


def one_query(
    q: Float[Array, "B 1 K G H"],
    pages: LayerPages,
    sinks: Float[Array, "K G"] | None,
    reading: AttentionParams,
    interpret: bool,
) -> Float[Array, "B 1 K G U"]:
    """Split-K decode attention (FlashDecoding): a kernel over parts of the keys, in as many blocks as fill a
    GPU, and one that adds the parts up."""
    (B, _, K, G, _), U = q.shape, value_size(q, reading)
    heads, rows, split = division(K, G, q.dtype, reading)
    blocks = blocks_of(rows, reading)
    parts = min(split.keywords["most"], pl.cdiv(most_tiles(pages, reading), split.keywords["least"]))
    sums = [jax.ShapeDtypeStruct((B, K, parts, G, *last), jnp.float32) for last in ((), (), (U,))]
    found = pl.pallas_call(
        partial(part_kernel, rows=rows, split=split, reading=reading),
        grid=(min(blocks, B * heads * parts),),
        out_shape=sums,
        cost_estimate=cost(q, pages, reading),
        name="attend_part",
        **settings(q, rows, reading, interpret),
    )(q, pages, shares(pages, split, reading))
    few = min(pl.next_power_of_2(G), max(1, SUMMED // ADDED // pl.next_power_of_2(U)))
    return pl.pallas_call(
        partial(sum_kernel, rows=few, split=split, reading=reading),
        grid=(B, K, pl.cdiv(G, few)),
        out_shape=jax.ShapeDtypeStruct((B, 1, K, G, U), q.dtype),
        name="attend_sum",
        **settings(q, few, reading, interpret),
    )(LayerPages(None, None, None, pages.start, pages.count), sinks, *found)


def most_tiles(pages: LayerPages, reading: AttentionParams) -> int:
    """Tiles that one query sees at most."""
    size = tile_of(reading)
    held = pl.cdiv(pages.table.shape[1] * pages.k.shape[2], size)
    return held if reading.window is None else min(held, pl.cdiv(reading.window - 1, size) + 1)


def division(K: int, G: int, dtype: Any, reading: AttentionParams) -> tuple[int, int, partial[Any]]:
    """Blocks that read one part, query heads of each block, and the function that splits a row's keys into
    parts."""
    rows = min(most_rows(reading, dtype), max(SMALL, pl.next_power_of_2(G)))
    heads, least = K * pl.cdiv(G, rows), least_part(rows, reading)
    most = max(1, min(2 * PROCESSORS, blocks_of(rows, reading)) // heads)  # a long row alone fills a GPU
    return heads, rows, partial(parts_of, size=tile_of(reading), most=most, least=least)


def most_rows(reading: AttentionParams, dtype: Any) -> int:
    """Rows of a product at most: number and GPU decide those of a latent layer, of whose float32 more rows
    would spill kilobytes of registers a thread."""
    if reading.rank is None:
        return MOST_ROWS
    if dtype.itemsize == 4:
        return SMALL
    here = gpu()
    return FEW_ROWS if here is not None and here.shared_memory < ASKED_BY_LATENTS else MOST_ROWS


def blocks_of(rows: int, reading: AttentionParams) -> int:
    """Blocks that a GPU runs at once, as far as registers and shared memory go."""
    each = 4 if reading.rank is None else 2 if rows == SMALL else 1
    return each * PROCESSORS


def least_part(rows: int, reading: AttentionParams) -> int:
    """Tiles of a part at least; the sums of a latent's many heads cost as much as many keys."""
    return 4 if reading.rank is None else max(8, rows // 4)


def parts_of(low: Any, end: Any, size: int, most: int, least: int) -> tuple[Any, Any, Any]:
    """First tile, number of tiles, and tiles of one part, for single queries that read keys in [low, end); at
    most `most` parts."""
    first = low // size
    tiles = jnp.maximum(pl.cdiv(end, size) - first, 0)
    return first, tiles, jnp.maximum(pl.cdiv(tiles, most), least)


def shares(pages: LayerPages, split: Split, reading: AttentionParams) -> Int[Array, " places"]:
    """The number of parts before each row's own and, from place B on, of all; the places are a power of
    two."""
    _, tiles, size = split(*seen(pages.start, pages.count, pages.start, 1, reading))
    B, parts = tiles.shape[0], pl.cdiv(tiles, size)
    place = jnp.arange(pl.next_power_of_2(B + 1), dtype=jnp.int32)
    return jnp.where(jnp.arange(B)[None] < place[:, None], parts[None], 0).sum(-1, dtype=jnp.int32)


def part_kernel(
    q: Any, pages: LayerPages, before: Any, *sums: Any, rows: int, split: Split, reading: AttentionParams
):
    """Process the parts block, block + blocks, ... of all rows; the assignment to blocks changes no part's
    bits."""
    B, _, K, G, _ = q.shape
    groups = pl.cdiv(G, rows)
    heads, blocks, block = K * groups, pl.num_programs(0), pl.program_id(0)
    places, total = before[...], before[B] * heads

    def work(i: Any, _: Any) -> None:
        at = block + i * blocks
        index, head, group = at // heads, at % heads // groups, at % groups
        row = (places <= index).astype(jnp.int32).sum() - 1
        one_part(q, pages, sums, (row, head, group, index - before[row]), rows, split, reading)

    jax.lax.fori_loop(0, pl.cdiv(jnp.maximum(total - block, 0), blocks), work, None)


def one_part(
    q: Any,
    pages: LayerPages,
    sums: Any,
    place: tuple[Any, ...],
    rows: int,
    split: Split,
    reading: AttentionParams,
):
    """The running softmax over a part of a row's keys, for some query heads of a key head."""
    row, head, group, part = place
    at = queries_of(q, pages, rows, (row, head, 0, group), reading)
    first, tiles, size = split(at.low, at.end)
    begin, end = part * size, jnp.minimum((part + 1) * size, tiles)
    nothing = no_keys(at, None, sums[2].shape[-1])
    found = over_keys(q, pages, at, (first + begin, first + end), nothing, reading)
    for ref, value in zip(sums, found, strict=True):
        store(ref, row, head, part, at.member, value=value, mask=at.real)


def sum_kernel(pages: LayerPages, sinks: Any, *refs: Any, rows: int, split: Split, reading: AttentionParams):
    """The parts of a row in order, some at a time."""
    *sums, out = refs
    row, head, group = (pl.program_id(axis) for axis in range(3))
    at = queries_of(out, pages, rows, (row, head, 0, group), reading)
    _, tiles, size = split(at.low, at.end)
    parts, each = pl.cdiv(tiles, size), min(ADDED, SUMMED // (rows * pl.next_power_of_2(out.shape[-1])))

    def add(i: Any, state: Any) -> Any:
        return add_parts(state, sums, at, i * each + jnp.arange(each, dtype=jnp.int32), parts)

    before = no_keys(at, sinks, out.shape[-1])
    _, total, found = jax.lax.fori_loop(0, pl.cdiv(parts, each), add, before)
    store(out, row, at.token, head, at.member, value=quotient(found, total), mask=at.real)

"""Attention over pages on NVIDIA GPUs: Pallas kernels (Triton backend) that read pages in place.

A running softmax over tiles of keys, as in FlashAttention (Dao et al., arXiv 2205.14135). The query heads of
a key head are rows of one product. A single query's keys are split into parts that a second kernel adds up
(flash-decoding, Dao et al., 2023). A fixed number of blocks shares the parts of all rows (as in Stream-K,
Osama et al., arXiv 2301.03598). So work follows the rows' lengths. Several queries go in tiles of their own.

Tiles of keys begin at multiples of their size, and a row's parts follow from its own length. So bits depend
neither on neighbours, nor on the page size, nor on the widths of table and chunk. The Triton backend is
deprecated since jax 0.11. On Hopper GPUs another kernel attends to prompts (`hopper_attention.py`). The
engine uses only `attend_with_kernels`, `has_attention_kernel` and `LayerPages`.
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
from ...model.gpus import Kernel, refusal_reason, target_gpu
from ..pages import attend_packed_heads
from ..quantised import SCALE_DTYPE, QuantisedPool
from . import cpu_attention, hopper_attention, tpu_attention
from .sharded_attention import LocalAttention, attend_on_devices
from .tiles import (
    TILE_KEYS,
    LayerPages,
    attend_tiles,
    attention_cost,
    divide_by_total,
    initial_tile_softmax,
    locate_tile_queries,
    merge_softmax_parts,
    store_piece,
    tile_size,
    value_size,
    visible_range,
)

HEAD_SIZES = range(16, 257, 16)  # of keys and values
LATENT_SIZES = range(16, 513, 16)  # ranks of latent rows
ROPE_SIZES = range(16, 129, 16)  # of the RoPE part of latent rows
KERNEL_DTYPES = ("bfloat16", "float16", "float32")
MAX_GROUPED_HEADS = 32  # query heads of a key head, at most
MAX_LATENT_HEADS = 128  # query heads of a latent layer, at most
MULTIPROCESSORS = 132  # multiprocessors of an H100 or an H200
MIN_PRODUCT_ROWS = 16  # rows of a tensor core's product, at least
MAX_PRODUCT_ROWS = 64  # rows of a single token's product, at most
SMALL_MEMORY_ROWS = 32  # rows of a latent layer's product if memory is too small for `MAX_PRODUCT_ROWS`
MAX_ADDED_PARTS = 32  # parts that are added at once, at most
MAX_ADDED_NUMBERS = 8192  # numbers of these parts, at most
KernelInput = Array | jax.ShapeDtypeStruct  # arrays or shapes
KernelPool = Shaped[KernelInput, "K P W _"] | QuantisedPool
KeySplit = Callable[[Any, Any], tuple[Any, Any, Any]]  # splits ranges of keys, as `split_key_range` does
TRITON_DECODE = Kernel("attention_decode", "triton", "attention gathers pages")
TRITON_PREFILL = Kernel("attention_prefill", "triton", "attention gathers pages")
TRITON_LATENT_DECODE = Kernel("latent_decode", "triton", "latent attention gathers pages")
TRITON_LATENT_PREFILL = Kernel("latent_prefill", "triton", "latent attention makes keys and values of pages")
# Bytes of shared memory that a block needs with all of its pipeline stages, if some GPUs have less. Keys:
# kernel, bytes of a number, and size of a head rounded up to a power of two. Compiled with jax 0.10.2.
SHARED_MEMORY_BYTES = {
    (TRITON_PREFILL.name, 2, 256): 107_008,
    (TRITON_PREFILL.name, 4, 256): 172_160,
    (TRITON_DECODE.name, 4, 256): 151_616,
}
# For rank 512 and a RoPE part of 64, with `MAX_PRODUCT_ROWS` rows, or `MIN_PRODUCT_ROWS` of float32.
LATENT_MEMORY_BYTES = 115_200


def fits_triton_kernel(
    q: Shaped[KernelInput, "B T N _"], k: KernelPool, v: KernelPool | None, attention: AttentionParams
) -> bool:
    """True if a Triton kernel has code for these queries and pools, whatever the GPU."""
    (*_, N, H), K = q.shape, k.shape[0]
    selects_keys, pools = attention.selection is not None or attention.alibi is not None, (k, v)
    readable = not selects_keys and all(pool is None or has_readable_dtype(pool, q.dtype) for pool in pools)
    H += 0 if attention.rope_queries is None else attention.rope_queries.shape[-1]
    same = k.shape[-1] == H and readable and q.dtype.name in KERNEL_DTYPES
    if attention.rank is not None:
        sizes = attention.rank in LATENT_SIZES and H - attention.rank in ROPE_SIZES
        return same and sizes and K == 1 and N <= MAX_LATENT_HEADS
    if v is None or attention.expand is not None:
        return False
    return same and v.shape == k.shape and H in HEAD_SIZES and N // K <= MAX_GROUPED_HEADS


def has_attention_kernel(
    q: Shaped[KernelInput, "B T N _"], pools: tuple[KernelPool, KernelPool | None], attention: AttentionParams
) -> bool:
    """True if a kernel attends in programs for the GPU that is compiled for."""
    by_triton = fits_triton_kernel(q, *pools, attention) and kernel_refusal(q, *pools, attention) is None
    return by_triton or hopper_attention.may_use_hopper_kernel(q, *pools, attention)


def kernel_refusal(
    q: Shaped[KernelInput, "B T N _"], k: KernelPool, v: KernelPool | None, attention: AttentionParams
) -> str | None:
    """Return why the GPU that is compiled for cannot run the kernel of a layer that passes
    `fits_triton_kernel`, or None."""
    kernel = choose_triton_kernel(q.shape[1], attention)
    return refusal_reason(
        kernel, min_shared_memory(kernel, q, k, attention), {pool.dtype for pool in jax.tree.leaves((k, v))}
    )


def choose_triton_kernel(T: int, attention: AttentionParams) -> Kernel:
    """Return the Triton kernel that attends with T queries per row."""
    decode_kernel, prefill_kernel = (
        (TRITON_DECODE, TRITON_PREFILL)
        if attention.rank is None
        else (TRITON_LATENT_DECODE, TRITON_LATENT_PREFILL)
    )
    return decode_kernel if T == 1 else prefill_kernel


def shared_memory_bytes(kernel: Kernel, H: int, dtype: Any) -> int:
    """Return the bytes of shared memory that a block needs with all of its pipeline stages; 0 if every GPU
    has them."""
    return SHARED_MEMORY_BYTES.get((kernel.name, dtype.itemsize, pl.next_power_of_2(H)), 0)


def min_shared_memory(
    kernel: Kernel, q: Shaped[KernelInput, "B T N _"], k: KernelPool, attention: AttentionParams
) -> int:
    """Return the bytes of shared memory that a block needs with one pipeline stage: a tile of queries, of
    keys and of values. 0 if every GPU has them."""
    (_, T, N, _), (K, *_, H), dtype = q.shape, k.shape, q.dtype
    if attention.rank is not None:
        return LATENT_MEMORY_BYTES if dtype.itemsize == 4 else 0
    if not shared_memory_bytes(kernel, H, dtype):
        return 0
    G = pl.next_power_of_2(N // K)
    rows = chunk_rows(G, H, dtype, attention) if T > 1 else min(MAX_PRODUCT_ROWS, max(MIN_PRODUCT_ROWS, G))
    return (rows + 2 * TILE_KEYS) * pl.next_power_of_2(H) * dtype.itemsize


def has_readable_dtype(pool: KernelPool, dtype: Any) -> bool:
    """True if a pool holds numbers of this dtype, or codes whose scales a GPU can read. A CPU's pool holds
    unsigned integers instead."""
    return pool.scales.dtype == SCALE_DTYPE if isinstance(pool, QuantisedPool) else pool.dtype == dtype


def attend_with_kernels(
    q: Float[Array, "B T N H"],
    pages: LayerPages,
    attention: AttentionParams,
    reference: Callable[[Float[Array, "B T N H"]], Float[Array, "B T N U"]],
    isa: str | None = None,
) -> Float[Array, "B T N U"]:
    """Attend with the kernel of the platform that is compiled for: GPU, TPU, or a CPU with instruction set
    `isa`. Without a kernel, call `reference`. Returns outputs in q's dtype."""

    def attend_reference(q: Float[Array, "B T N H"]) -> Float[Array, "B T N U"]:
        """Attend with the reference; a latent layer's queries are joined with their RoPE part."""
        queries = (
            q if attention.rope_queries is None else jnp.concatenate([q, attention.rope_queries], axis=-1)
        )
        return reference(queries).astype(q.dtype)

    kernels: dict[str, Callable[[Any], Any]] = {}
    if tpu_attention.has_tpu_kernel(q, pages, attention):
        by_kernel = partial(tpu_attention.attend_tpu, pages=pages, attention=attention)
        kernels["tpu"] = lambda q: attend_packed_heads(by_kernel, q, pages.k, attention.num_kv_heads)
    if has_attention_kernel(q, pages[:2], attention):
        kernels["cuda"] = lambda q: attend_gpu(q, pages, attention)
    if isa is not None and cpu_attention.fits_cpu_kernel(q, *pages[:2], attention):
        kernels["cpu"] = lambda q: cpu_attention.attend_cpu(q, pages, attention, isa)
    return (
        jax.lax.platform_dependent(q, **kernels, default=attend_reference) if kernels else attend_reference(q)
    )


def attend_gpu(
    q: Float[Array, "B T N H"], pages: LayerPages, attention: AttentionParams, interpret: bool = False
) -> Float[Array, "B T N U"]:
    """Attend with the GPU's kernel to the pages of each row. Returns outputs in q's dtype. Empty rows get
    zeros."""
    return attend_on_devices(choose_attend(q, pages, attention, interpret), q, pages, attention, interpret)


def choose_attend(
    q: Shaped[KernelInput, "B T N H"], pages: LayerPages, attention: AttentionParams, interpret: bool
) -> LocalAttention:
    """Return the kernel for one query per row, or for several: Mosaic's if it runs here, else Triton's."""
    if q.shape[1] == 1:
        return attend_split_keys
    fits_hopper = not interpret and hopper_attention.may_use_hopper_kernel(q, *pages[:2], attention)
    return hopper_attention.attend_chunk_hopper if fits_hopper else attend_chunk


def compiler_settings(
    q: Float[Array, "B T K G H"], rows: int, attention: AttentionParams, interpret: bool
) -> dict[str, Any]:
    """Return the compiler settings of a kernel with products of `rows` rows. Wide heads leave room for fewer
    pipeline stages, which changes no bits."""
    stages, device = 3 if pl.next_power_of_2(q.shape[-1]) * q.dtype.itemsize <= 256 else 2, target_gpu()
    if (
        device
        and shared_memory_bytes(choose_triton_kernel(q.shape[1], attention), q.shape[-1], q.dtype)
        > device.shared_memory
    ):
        stages = 1
    many = rows > 64 if attention.rank is None else rows > 16
    params = triton.CompilerParams(num_warps=8 if many else 4, num_stages=stages)
    return {"compiler_params": params, "interpret": interpret}


# ---------------------------------------------------------------- several queries per row


def attend_chunk(
    q: Float[Array, "B T K G H"],
    pages: LayerPages,
    sinks: Float[Array, "K G"] | None,
    attention: AttentionParams,
    interpret: bool,
) -> Float[Array, "B T K G U"]:
    """Attend with several queries per row, tile by tile. The last tiles run first, because they read the most
    keys."""
    B, T, K, G, H = q.shape
    rows = chunk_rows(G, H, q.dtype, attention)
    tokens, groups = max(1, rows // pl.next_power_of_2(G)), pl.cdiv(G, rows)
    return pl.pallas_call(
        partial(triton_chunk_kernel, rows=rows, attention=attention),
        grid=(pl.cdiv(T, tokens), K * groups, B),
        out_shape=jax.ShapeDtypeStruct((B, T, K, G, value_size(q, attention)), q.dtype),
        cost_estimate=attention_cost(q, pages, attention),
        name="attend_chunk",
        **compiler_settings(q, rows, attention, interpret),
    )(q, pages, sinks)


def chunk_rows(G: int, H: int, dtype: Any, attention: AttentionParams) -> int:
    """Return the rows of a tile of queries. A latent layer's many heads take several tiles."""
    if attention.rank is not None:
        return max_product_rows(attention, dtype)
    # with 64 rows of wide heads, two blocks fit on a multiprocessor
    max_rows = 2 * MAX_PRODUCT_ROWS if pl.next_power_of_2(H) < 128 else MAX_PRODUCT_ROWS
    return max(MIN_PRODUCT_ROWS, pl.next_power_of_2(G), 2 * max_rows // dtype.itemsize)


def triton_chunk_kernel(
    q: Any, pages: LayerPages, sinks: Any, out: Any, *, rows: int, attention: AttentionParams
):
    """Attend with one tile of queries (kernel body)."""
    tile, groups = pl.num_programs(0) - 1 - pl.program_id(0), pl.cdiv(q.shape[3], rows)
    head, group = pl.program_id(1) // groups, pl.program_id(1) % groups
    queries = locate_tile_queries(q, pages, rows, (pl.program_id(2), head, tile, group), attention)
    before, size = initial_tile_softmax(queries, sinks, out.shape[-1]), tile_size(attention)
    _, total, out_sums = attend_tiles(
        q, pages, queries, (queries.low // size, pl.cdiv(queries.end, size)), before, attention
    )
    store_piece(
        out,
        queries.row,
        queries.token,
        queries.head,
        queries.member,
        value=divide_by_total(out_sums, total),
        mask=queries.real,
    )


# ---------------------------------------------------------------- one query per row


def attend_split_keys(
    q: Float[Array, "B 1 K G H"],
    pages: LayerPages,
    sinks: Float[Array, "K G"] | None,
    attention: AttentionParams,
    interpret: bool,
) -> Float[Array, "B 1 K G U"]:
    """Attend with one query per row by split-K (FlashDecoding). One kernel reads parts of the keys, in as
    many blocks as fill a GPU. A second kernel adds the parts up."""
    (B, _, K, G, _), U = q.shape, value_size(q, attention)
    heads, rows, split = plan_key_split(K, G, q.dtype, attention)
    blocks = concurrent_blocks(rows, attention)
    parts = min(
        split.keywords["max_parts"], pl.cdiv(max_visible_tiles(pages, attention), split.keywords["min_tiles"])
    )
    sums = [jax.ShapeDtypeStruct((B, K, parts, G, *last), jnp.float32) for last in ((), (), (U,))]
    part_sums = pl.pallas_call(
        partial(part_kernel, rows=rows, split=split, attention=attention),
        grid=(min(blocks, B * heads * parts),),
        out_shape=sums,
        cost_estimate=attention_cost(q, pages, attention),
        name="attend_part",
        **compiler_settings(q, rows, attention, interpret),
    )(q, pages, parts_before_row(pages, split, attention))
    sum_rows = min(
        pl.next_power_of_2(G), max(1, MAX_ADDED_NUMBERS // MAX_ADDED_PARTS // pl.next_power_of_2(U))
    )
    return pl.pallas_call(
        partial(sum_kernel, rows=sum_rows, split=split, attention=attention),
        grid=(B, K, pl.cdiv(G, sum_rows)),
        out_shape=jax.ShapeDtypeStruct((B, 1, K, G, U), q.dtype),
        name="attend_sum",
        **compiler_settings(q, sum_rows, attention, interpret),
    )(LayerPages(None, None, None, pages.start, pages.count), sinks, *part_sums)


def max_visible_tiles(pages: LayerPages, attention: AttentionParams) -> int:
    """Return the most tiles of keys that one query sees."""
    size = tile_size(attention)
    held = pl.cdiv(pages.table.shape[1] * pages.k.shape[2], size)
    return held if attention.window is None else min(held, pl.cdiv(attention.window - 1, size) + 1)


def plan_key_split(K: int, G: int, dtype: Any, attention: AttentionParams) -> tuple[int, int, partial[Any]]:
    """Return how one query's keys are split: the blocks that read a part, one for each group of query heads;
    the rows of a block's products; and the function that splits a row's keys."""
    rows = min(max_product_rows(attention, dtype), max(MIN_PRODUCT_ROWS, pl.next_power_of_2(G)))
    heads, min_tiles = K * pl.cdiv(G, rows), min_part_tiles(rows, attention)
    # one long row can fill a GPU
    max_parts = max(1, min(2 * MULTIPROCESSORS, concurrent_blocks(rows, attention)) // heads)
    return (
        heads,
        rows,
        partial(split_key_range, size=tile_size(attention), max_parts=max_parts, min_tiles=min_tiles),
    )


def max_product_rows(attention: AttentionParams, dtype: Any) -> int:
    """Return the most rows of a product. For a latent layer they depend on the dtype and the GPU. More rows
    of float32 would spill kilobytes of registers per thread."""
    if attention.rank is None:
        return MAX_PRODUCT_ROWS
    if dtype.itemsize == 4:
        return MIN_PRODUCT_ROWS
    device = target_gpu()
    return (
        SMALL_MEMORY_ROWS
        if device is not None and device.shared_memory < LATENT_MEMORY_BYTES
        else MAX_PRODUCT_ROWS
    )


def concurrent_blocks(rows: int, attention: AttentionParams) -> int:
    """Return the number of blocks that a GPU runs at once, as limited by registers and shared memory."""
    processor_blocks = 4 if attention.rank is None else 2 if rows == MIN_PRODUCT_ROWS else 1
    return processor_blocks * MULTIPROCESSORS


def min_part_tiles(rows: int, attention: AttentionParams) -> int:
    """Return the fewest tiles of a part. The sums of a latent layer's many heads cost as much as many keys,
    so its parts are longer."""
    return 4 if attention.rank is None else max(8, rows // 4)


def split_key_range(low: Any, end: Any, size: int, max_parts: int, min_tiles: int) -> tuple[Any, Any, Any]:
    """Split the keys [low, end) of single queries into at most `max_parts` parts of at least `min_tiles`
    tiles. Returns the first tile, the number of tiles, and the tiles of one part."""
    first = low // size
    tiles = jnp.maximum(pl.cdiv(end, size) - first, 0)
    return first, tiles, jnp.maximum(pl.cdiv(tiles, max_parts), min_tiles)


def parts_before_row(pages: LayerPages, split: KeySplit, attention: AttentionParams) -> Int[Array, " places"]:
    """Return the number of parts before each row's first, and from index B on the number of all parts. The
    length is a power of two."""
    _, tiles, size = split(*visible_range(pages.start, pages.count, pages.start, 1, attention))
    B, parts = tiles.shape[0], pl.cdiv(tiles, size)
    place = jnp.arange(pl.next_power_of_2(B + 1), dtype=jnp.int32)
    return jnp.where(jnp.arange(B)[None] < place[:, None], parts[None], 0).sum(-1, dtype=jnp.int32)


def part_kernel(
    q: Any, pages: LayerPages, before: Any, *sums: Any, rows: int, split: KeySplit, attention: AttentionParams
):
    """Process the parts block, block + blocks, ... of all rows (kernel body). The assignment to blocks
    changes no part's bits."""
    B, _, K, G, _ = q.shape
    groups = pl.cdiv(G, rows)
    heads, blocks, block = K * groups, pl.num_programs(0), pl.program_id(0)
    places, total = before[...], before[B] * heads

    def attend_next_part(i: Any, _: Any) -> None:
        """Process one part for one group of query heads."""
        unit = block + i * blocks
        index, head, group = unit // heads, unit % heads // groups, unit % groups
        row = (places <= index).astype(jnp.int32).sum() - 1
        attend_part(q, pages, sums, (row, head, group, index - before[row]), rows, split, attention)

    jax.lax.fori_loop(0, pl.cdiv(jnp.maximum(total - block, 0), blocks), attend_next_part, None)


def attend_part(
    q: Any,
    pages: LayerPages,
    sums: Any,
    part_index: tuple[Any, ...],
    rows: int,
    split: KeySplit,
    attention: AttentionParams,
):
    """Run the softmax over a part of a row's keys, for some query heads of a key head, and store its
    state."""
    row, head, group, part = part_index
    queries = locate_tile_queries(q, pages, rows, (row, head, 0, group), attention)
    first, tiles, size = split(queries.low, queries.end)
    begin, end = part * size, jnp.minimum((part + 1) * size, tiles)
    nothing = initial_tile_softmax(queries, None, sums[2].shape[-1])
    state = attend_tiles(q, pages, queries, (first + begin, first + end), nothing, attention)
    for ref, value in zip(sums, state, strict=True):
        store_piece(ref, row, head, part, queries.member, value=value, mask=queries.real)


def sum_kernel(
    pages: LayerPages, sinks: Any, *refs: Any, rows: int, split: KeySplit, attention: AttentionParams
):
    """Add up the parts of a row in order, some at a time, and store the outputs (kernel body)."""
    *sums, out = refs
    row, head, group = (pl.program_id(axis) for axis in range(3))
    queries = locate_tile_queries(out, pages, rows, (row, head, 0, group), attention)
    _, tiles, size = split(queries.low, queries.end)
    parts, parts_at_once = (
        pl.cdiv(tiles, size),
        min(MAX_ADDED_PARTS, MAX_ADDED_NUMBERS // (rows * pl.next_power_of_2(out.shape[-1]))),
    )

    def add_next_parts(i: Any, state: Any) -> Any:
        """Add the next parts to the state."""
        return merge_softmax_parts(
            state, sums, queries, i * parts_at_once + jnp.arange(parts_at_once, dtype=jnp.int32), parts
        )

    before = initial_tile_softmax(queries, sinks, out.shape[-1])
    _, total, out_sums = jax.lax.fori_loop(0, pl.cdiv(parts, parts_at_once), add_next_parts, before)
    store_piece(
        out,
        row,
        queries.token,
        head,
        queries.member,
        value=divide_by_total(out_sums, total),
        mask=queries.real,
    )

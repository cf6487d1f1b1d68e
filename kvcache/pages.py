"""The paged KV cache: pools of pages on the device, the batch of a step, and attention that reads pages in
place.

Paging is PagedAttention's (Kwon et al., arXiv 2309.06180). Keys are read in blocks of a fixed number of
positions, in order, with a running softmax (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, Dao et
al., arXiv 2205.14135). A block without visible keys changes no bit of the result. So a row's output depends
neither on its neighbours' lengths nor on the page size.
"""

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from ..model.attention import MASK_VALUE, AttentionParams, ExpandRows, group_queries
from ..model.config import LayerKind, distinct_windows
from ..model.layers import add_alibi, einsum, index_or_drop
from ..model.recurrent.kinds import STATE_WINDOW
from ..model.sharding import is_multi_device
from ..model.tree import pytree, static
from ..model.weights.device_forms import Lanes, next_multiple
from .groups import group_by_length
from .quantised import (
    CacheFormat,
    Pool,
    QuantisedPool,
    Scheme,
    cast_bits,
    dequantise_heads,
    empty_pool,
    head_bytes,
    quantise_heads,
)
from .shards import apply_to_local_heads
from .sparse_attention import IndexReader, SelectedKeys, select_top_keys
from .states import StatePool, empty_states, state_bytes

KEYS_PER_BLOCK = 128  # key positions read at once; page sizes divide it or are multiples of it
ON_DEVICE = -1  # in `Batch.tokens`: the device knows the token, or drafts it
MAX_SWAPPED_QUERIES = 16  # queries of a row and key head, up to which a CPU swaps their products' operands
NO_LANES = Lanes()
VECTOR_FLOATS = 16  # float32 numbers of a CPU's widest vector
# running softmax: highest score and total weight of each query, and weighted sums of values [K,B,queries,U]
SoftmaxSums = tuple[Float[Array, "K B queries ..."], ...]
# pools of a layer's keys and values; a latent layer has no values, but its indexer's keys in their place
LayerPools = tuple[Pool, Shaped[Array, "K P W values"] | QuantisedPool | None]
NewKV = Float[Array, "B T _ _"]  # new keys or values of each head, or latent rows
SlotMapping = tuple[Int[Array, "B T"], Int[Array, "B T"]]  # page and offset of each token
# keys and values of one block of some rows; a latent layer has more heads here than in its pool
KVBlock = tuple[Float[Array, "heads rows S size"], Float[Array, "heads rows S U"]]


@pytree
class KVCache:
    """Pools of pages, one or two per layer, head-major. Position p of a row is slot p % W of its page p // W.

    Layers of one window have pools with the same number of pages and share a page table. A latent layer has
    one row per token in place of keys. With sparse attention, the indexer's keys take the place of its
    values. A recurrent layer has a pool of states, in place of keys or in addition to them. A layer that
    reads another layer's keys has no pool. The first axis of every array is the heads, the second the pages.
    """

    k: tuple[Any, ...]  # L of [K,P,W,H] or None
    v: tuple[Any, ...]  # L of [K,P,W,H] or None
    states: tuple[Any, ...] = ()  # L of StatePool or None
    isa: str | None = static(None)  # instruction set of the CPU kernels, if they read the cache


@pytree
class Batch:
    """Input of one step, row by row. Positions, write slots, masks and lengths follow from it.

    A row's first token may be ON_DEVICE: the last token sampled in its slot, which the host may not know yet.
    Later in the row, ON_DEVICE stands for a draft token that the program makes itself.
    """

    tokens: Any  # int32 [B,T], padded on the right
    start: Any  # int32 [B], tokens before each row: in the cache, or in earlier rows of the step
    count: Any  # int32 [B], real tokens among the T; 0 is an empty row
    # int32 [B,M] for each window: pages of each row in order; unread entries are arbitrary
    page_tables: tuple[Any, ...]
    slot: Any  # int32 [B], slot of each row in the sampling state
    # int32 [rows], places (b*T + t) that hold a token, padded with B*T; None computes all places
    packed: Any = None
    embeddings: Any = None  # InputEmbeddings of a prefill; None if the model has no encoder


def token_positions(batch: Batch) -> Int[Array, "B T"]:
    """Return the position of every token of the batch, padding included."""
    return batch.start[:, None] + jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None]


def layer_token_bytes(kind: LayerKind, cache_format: CacheFormat, lanes: Lanes = NO_LANES) -> int:
    """Return the bytes that one token takes in the cache of one layer."""
    rows = filter(None, kind.attention.cache_shapes if kind.attention else ())
    row_shapes = (pool_row_shape(*row, cache_format, lanes) for row in rows)
    return sum(heads * head_bytes(size, cache_format) for heads, size in row_shapes)


def page_bytes(
    layers: Sequence[LayerKind], page_size: int, cache_format: CacheFormat, lanes: Lanes = NO_LANES
) -> tuple[int, ...]:
    """Return the bytes of one page for each window: keys and values of all layers of that window, or their
    states."""

    def window_page_bytes(window: int | None) -> int:
        """Return the bytes of one page of one window."""
        if window == STATE_WINDOW:
            return sum(state_bytes(layer.state_shapes) for layer in layers if layer.state_shapes)
        window_layers = [layer for layer in layers if layer.attention and layer.attention.window == window]
        return sum(layer_token_bytes(layer, cache_format, lanes) for layer in window_layers) * page_size

    return tuple(map(window_page_bytes, distinct_windows(layers)))


def empty_cache(
    layers: Sequence[LayerKind],
    pages: Sequence[int],
    page_size: int,
    cache_format: CacheFormat,
    device: Any = None,
    isa: str | None = None,
    lanes: Lanes = NO_LANES,
) -> KVCache:
    """Make a cache of zeros in the device's layout. `pages[i]` is the number of pages for the i-th window of
    the layers. Rows of heads are padded to whole `lanes`.

    Raises ValueError for a page size that does not fit the blocks that attention reads.
    """
    if page_size < 1 or (KEYS_PER_BLOCK % page_size and page_size % KEYS_PER_BLOCK):
        raise ValueError(f"page_size {page_size} must divide {KEYS_PER_BLOCK} or be a multiple of it")
    pages_by_window = dict(zip(distinct_windows(layers), pages, strict=True))

    def make_pool(kind: LayerKind, i: int) -> Pool | None:
        if kind.attention is None or (row := kind.attention.cache_shapes[i]) is None:
            return None
        heads, size = pool_row_shape(*row, cache_format, lanes)
        return empty_pool(
            (heads, pages_by_window[kind.attention.window], page_size, size), cache_format, device
        )

    def make_states(kind: LayerKind) -> StatePool | None:
        return kind.state_shapes and empty_states(kind.state_shapes, pages_by_window[STATE_WINDOW], page_size)

    keys, values = (tuple(make_pool(kind, i) for kind in layers) for i in range(2))
    return KVCache(keys, values, tuple(map(make_states, layers)), isa)


def pool_row_shape(K: int, H: int, cache_format: CacheFormat, lanes: Lanes) -> tuple[int, int]:
    """Return the number and size of a token's rows in a pool, for K heads of H numbers. A row has several
    heads, or one head and zeros behind it. With 8-bit codes each head has its own row, because it has its own
    scale."""
    device_heads = K // gcd(K, lanes.devices)  # heads of one device
    n = 1 if isinstance(cache_format, Scheme) else heads_per_row(device_heads, H, lanes.size)
    return K // n, next_multiple(n * H, lanes.size)


def heads_per_row(K: int, H: int, lanes: int) -> int:
    """Return the fewest of K heads with H numbers each that fill whole lanes together; 1 if no number of
    heads does."""
    n = lanes // gcd(H, lanes)
    return n if K % n == 0 else 1


def attend_packed_heads(
    attend: Callable[[Float[Array, "B T N H"]], Float[Array, "B T N U"]],
    q: Float[Array, "B T N head_size"],
    pool: Pool,
    heads: int,
) -> Float[Array, "B T N values"]:
    """Attend to a pool whose rows hold several heads, or one head and zeros. Queries get zeros in the places
    of other heads and of padding. Returns the outputs of the original heads."""
    (B, T, N, H), K, size = q.shape, pool.shape[0], pool.shape[-1]
    if size == H:
        return attend(q)
    n = heads // K
    if n == 1:
        return attend(pad_heads(q, size))[..., :H]
    selector = jnp.expand_dims(jnp.eye(n, dtype=q.dtype), (0, 1, 2, 4, 6))
    out = attend((q.reshape(B, T, K, n, -1, 1, H) * selector).reshape(B, T, N, size))
    parts = out.reshape(B, T, K, n, -1, n, H)
    return jnp.stack([parts[:, :, :, i, :, i] for i in range(n)], axis=3).reshape(B, T, N, H)


def pad_heads(x: Float[Array, "*heads head_size"], size: int) -> Float[Array, "*heads size"]:
    """Pad each row with zeros to `size` numbers."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, size - x.shape[-1]),))


def to_pool_layout(pool: Pool, new: NewKV) -> Float[Array, "B T K H"]:
    """Reshape or pad new heads to the row layout of their pool."""
    K, size = pool.shape[0], pool.shape[-1]
    if new.shape[2] == K and new.shape[3] != size:
        return pad_heads(new, size)
    return new.reshape(*new.shape[:2], K, size)


def write_pool(
    pool: Pool, page: Int[Array, "B T"], offset: Int[Array, "B T"], new: Float[Array, "B T K H"]
) -> Pool:
    """Write new keys or values to a pool, each at its page and offset. A page number past the pool drops its
    token."""
    return apply_to_local_heads(write_heads, pool, (page, offset), new, axis=2)


def write_heads(
    pool: Pool, page: Int[Array, "B T"], offset: Int[Array, "B T"], new: Float[Array, "B T K H"]
) -> Pool:
    """Write the keys or values of every head in this array; `write_pool` calls this on each device with the
    heads it holds."""
    # advanced indexing on every axis: a slice here costs a TPU a copy of the pool (layout)
    head = jnp.arange(pool.shape[0], dtype=jnp.int32)[:, None, None]

    def put_array(
        pool_array: Shaped[Array, "K P W ..."], new: Shaped[Array, "B T K ..."]
    ) -> Shaped[Array, "K P W ..."]:
        new = cast_bits(jnp.moveaxis(new, 2, 0), pool_array.dtype)
        return pool_array.at[head, page[None], offset[None]].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(put_array, pool, quantise_heads(pool, new))


def read_block(
    pool: Pool, page_table: Int[Array, "B M"], j: Int[Array, " B"], dtype: Any
) -> Float[Array, "K B S H"]:
    """Return the keys or values of block j of every row: its j-th KEYS_PER_BLOCK positions. Each row has its
    own j. Past the page table, the last page is read."""
    K, _, W, _ = pool.shape
    per_block, per_page = max(1, KEYS_PER_BLOCK // W), max(1, W // KEYS_PER_BLOCK)
    entry = (j // per_page * per_block)[:, None] + jnp.arange(per_block, dtype=jnp.int32)[None]
    page = jnp.take_along_axis(page_table, entry, axis=1, mode="clip")
    page = page * per_page + (j % per_page)[:, None]

    def gather_block(pool_array: Shaped[Array, "K P W ..."]) -> Shaped[Array, "K B S ..."]:
        rest = pool_array.shape[3:]
        # a long page is split into pages of one block
        blocks = pool_array.reshape(K, -1, W // per_page, *rest)
        return blocks[:, page].reshape(K, len(j), KEYS_PER_BLOCK, *rest)

    return dequantise_heads(jax.tree.map(gather_block, pool), dtype)


def read_kv_block(
    pools: LayerPools,
    page_table: Int[Array, "B M"],
    attention: AttentionParams,
    dtype: Any,
    rows: Int[Array, " rows"],
    j: Int[Array, " rows"],
) -> KVBlock:
    """Return keys and values of block j of some rows. A latent layer's are expanded here."""
    keys = read_block(pools[0], page_table[rows], j, dtype)
    if attention.expand is None:
        return keys, read_value_block(pools, page_table, dtype, rows, j)
    return expand_latent(keys, rows, attention.expand)


def expand_latent(keys: Float[Array, "1 rows S H"], rows: Int[Array, " rows"], expand: ExpandRows) -> KVBlock:
    """Expand a block of latent rows to every head's keys and values. `rows` are the numbers of their batch
    rows."""
    k, v = expand(keys.transpose(1, 2, 0, 3), rows)
    return k.transpose(2, 0, 1, 3), v.transpose(2, 0, 1, 3)


def read_value_block(
    pools: LayerPools,
    page_table: Int[Array, "B M"],
    dtype: Any,
    rows: Int[Array, " rows"],
    j: Int[Array, " rows"],
) -> Float[Array, "K rows S values"]:
    """Return the values of block j of some rows, or the indexer's keys of a latent layer."""
    assert pools[1] is not None
    return read_block(pools[1], page_table[rows], j, dtype)


def attend_key_blocks(
    q: Float[Array, "B T N H"],
    batch: Batch,
    read: Callable[[Int[Array, " rows"], Int[Array, " rows"]], KVBlock],
    attention: AttentionParams,
    selected_keys: SelectedKeys | None = None,
) -> Float[Array, "B T N U"]:
    """Attend to the rows' keys with a running softmax. `read(rows, j)` returns keys and values of block j of
    some rows.

    Rows are processed in groups of similar length, longest first, so that few rows wait for the longest. A
    group's blocks stay in a CPU's cache.
    """
    B, T, N, _ = q.shape
    k, v = jax.eval_shape(read, batch.start, batch.start)
    K, U, G = k.shape[0], v.shape[-1], N // k.shape[0]
    end = batch.start + batch.count
    low = attention.first_visible(batch.start)
    # each row begins at its own first block, so a window reads few blocks
    first = jnp.maximum(low, 0) // KEYS_PER_BLOCK
    groups = group_by_length(
        jnp.where(batch.count > 0, (end + KEYS_PER_BLOCK - 1) // KEYS_PER_BLOCK - first, 0), T
    )
    q = groups.sort(group_queries(q, K).transpose(2, 0, 1, 3, 4).reshape(K, B, T * G, -1))
    pos = jnp.repeat(token_positions(batch), G, axis=1)  # [B,T*G]
    slopes = repeat_slopes(attention.alibi, K, T)

    def add_block(i: Int[Array, ""], sums: SoftmaxSums) -> SoftmaxSums:
        """Add one block of one group to the running sums."""
        group, rows, j = groups.locate_step(i)
        key_positions = (first[rows] + j)[:, None] * KEYS_PER_BLOCK + jnp.arange(
            KEYS_PER_BLOCK, dtype=jnp.int32
        )[None]  # [R,BLOCK]
        k, v = read(rows, first[rows] + j)
        # pages before the window and a page's unwritten tail may hold anything
        is_written = (key_positions >= low[rows, None]) & (key_positions < end[rows, None])
        v = jnp.where(is_written[None, ..., None], v, 0)
        scores = attention.scores(query_key_products(groups.slice_group(q, group), k))
        query_and_key = pos[rows, :, None], key_positions[:, None]
        scores = add_alibi(scores, slopes, (K, 1, T * G, 1), *query_and_key)
        sees = attention.mask(*query_and_key)
        if selected_keys is not None:
            sees &= jnp.repeat(selected_keys.sees(rows, j, KEYS_PER_BLOCK), G, axis=1)
        scores = jnp.where(sees[None], scores, MASK_VALUE)
        top, total, out = (groups.slice_group(x, group) for x in sums)
        new_top = jnp.maximum(top, scores.max(-1))
        fade, weights = exp_by_vectors(top - new_top), jnp.exp(scores - new_top[..., None])
        add = einsum("kbqs,kbsu->kbqu", weights.astype(v.dtype), v, jnp.float32)
        new_sums = new_top, total * fade + weights.sum(-1), out * fade[..., None] + add
        return tuple(groups.set_group(x, y, group) for x, y in zip(sums, new_sums, strict=True))

    sums = (*initial_softmax(attention, (K, B, T, G)), jnp.zeros((K, B, T * G, U)))
    _, total, out = jax.lax.fori_loop(0, groups.end_steps[-1], add_block, sums)
    out = groups.unsort(out / jnp.maximum(total, 1e-30)[..., None])
    return out.reshape(K, B, T, G, U).transpose(1, 2, 0, 3, 4).reshape(B, T, N, U)


def repeat_slopes(slopes: tuple[float, ...] | None, K: int, T: int) -> tuple[float, ...] | None:
    """Repeat each key head's slopes for T tokens: an order of heads [K,T,G]."""
    return None if slopes is None else tuple(np.repeat(np.reshape(slopes, (K, 1, -1)), T, axis=1).ravel())


def exp_by_vectors(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return e**x, with bits that do not depend on x's shape on one device. In short loops on a CPU, XLA (jax
    0.12) uses vectors of several widths, which round differently. A barrier and padding to whole vectors
    prevent this."""
    if is_multi_device(x):  # flattening a sharded array would all-gather it
        return jnp.exp(x)

    def exp_flat(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        row = jax.lax.optimization_barrier(jnp.pad(x.reshape(-1), (0, -x.size % VECTOR_FLOATS)))
        return jax.lax.optimization_barrier(jnp.exp(row))[: x.size].reshape(x.shape)

    return jax.lax.platform_dependent(x, cpu=exp_flat, default=jnp.exp)


def select_sparse_keys(
    attention: AttentionParams, batch: Batch, table: Int[Array, "B M"], W: int, read_index: IndexReader
) -> SelectedKeys | None:
    """Select the keys that each query sees in sparse attention; None if queries see all keys. `read_index`
    reads blocks of the indexer's keys."""
    if attention.selection is None:
        return None
    end = jnp.where(batch.count > 0, batch.start + batch.count, 0)
    return select_top_keys(attention.selection, token_positions(batch), end, table.shape[1] * W, read_index)


def query_key_products(
    q: Float[Array, "K B queries H"], k: Float[Array, "K B S H"]
) -> Float32[Array, "K B queries S"]:
    """Return the dot products of queries and keys. For few queries a CPU computes keys times queries in half
    the time. An optimization barrier keeps XLA from swapping the operands back."""
    if q.shape[2] > MAX_SWAPPED_QUERIES:
        return einsum("kbqh,kbsh->kbqs", q, k, jnp.float32)
    return jax.lax.optimization_barrier(einsum("kbsh,kbqh->kbsq", k, q, jnp.float32)).swapaxes(2, 3)


def initial_softmax(
    attention: AttentionParams, shape: tuple[int, int, int, int]
) -> tuple[Float[Array, "K B queries"], Float[Array, "K B queries"]]:
    """Return the running softmax's highest score and total before the first key: no weight, or the sinks."""
    K, B, T, G = shape
    if attention.sinks is None:
        return jnp.full((K, B, T * G), MASK_VALUE), jnp.zeros((K, B, T * G))
    sinks = attention.sinks.astype(jnp.float32).reshape(K, 1, 1, G)
    return jnp.broadcast_to(sinks, shape).reshape(K, B, T * G), jnp.ones((K, B, T * G))


def is_new_token(batch: Batch) -> Bool[Array, "B T"]:
    """True for the tokens to be written: real tokens, except a row's first token that the previous row ends
    with. A scored prompt's next chunk repeats that token."""
    (B, T), end = batch.tokens.shape, batch.start + batch.count
    offset = jnp.arange(T, dtype=jnp.int32)[None]
    is_real = offset < batch.count[:, None]
    if B == 1 or T == 1:
        return is_real
    is_repeated = (batch.slot[1:] == batch.slot[:-1]) & (batch.start[1:] == end[:-1] - 1)
    return is_real & ~(jnp.pad(is_repeated, (1, 0))[:, None] & (offset == 0))


@jax.named_scope("write_kv")
def write_kv(
    pools: LayerPools,
    batch: Batch,
    table: Int[Array, "B M"],
    k: NewKV,
    v: NewKV | None,
) -> LayerPools:
    """Write the keys and values of the batch's tokens to a layer's pools. Returns the pools."""
    return write_kv_to_slots(pools, compute_slot_mapping(pools, batch, table), k, v)


def write_kv_to_slots(pools: LayerPools, slot_mapping: SlotMapping, k: NewKV, v: NewKV | None) -> LayerPools:
    """Write keys and values at known slots, `slot_mapping` (page and offset of each token). Returns the
    pools."""

    def put_pool(pool: Pool, new: NewKV) -> Pool:
        return write_pool(pool, *slot_mapping, to_pool_layout(pool, new))

    (keys, values) = pools
    keys = put_pool(keys, k)
    if v is not None:
        assert values is not None
        values = put_pool(values, v)
    return keys, values


def compute_slot_mapping(pools: LayerPools, batch: Batch, table: Int[Array, "B M"]) -> SlotMapping:
    """Return the slot of each token of the batch: its page, and its offset in the page. A token that is not
    written gets a page past the pool."""
    _, P, W, _ = pools[0].shape
    pos = token_positions(batch)
    entry = jnp.minimum(pos // W, table.shape[1] - 1)
    return index_or_drop(jnp.take_along_axis(table, entry, 1), is_new_token(batch), P), pos % W


def with_layer_pool(pools: tuple[Any, ...], layer: int, pool: Any) -> tuple[Any, ...]:
    """Return the pools of all layers, with one layer's pool replaced."""
    return (*pools[:layer], pool, *pools[layer + 1 :])

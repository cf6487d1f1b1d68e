"""The paged cache: pools of pages on the device, the batch that a step is told, and attention that reads
pages where they lie.

Paging is PagedAttention's (Kwon et al., arXiv 2309.06180). Keys are read in blocks of a fixed number of
positions, in order, with a running softmax (Milakov and Gimelshein, arXiv 1805.02867; FlashAttention, Dao et
al., arXiv 2205.14135). A block without visible keys changes no bit of the result, so a row's output depends
neither on its neighbours' lengths nor on the page size.
"""

from collections.abc import Callable, Sequence
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Shaped

from ..model.attention import UNSEEN, AttentionParams, Expand, grouped
from ..model.config import LayerKind, windows_of
from ..model.layers import apart, einsum
from ..model.recurrent.kinds import STATE
from ..model.sharding import on_several_devices
from ..model.tree import pytree, static
from ..model.weights.prepared import Lanes, filling
from .groups import by_length
from .quantised import Kept, Pool, QuantisedPool, Scheme, as_dtype, decoded, empty_pool, encoded, head_bytes
from .shards import split_heads
from .sparse_attention import Index, SelectedKeys, choose
from .states import StatePool, empty_states, state_bytes

BLOCK = 128  # key positions read at once; page sizes divide it or are multiples of it
POOLED = -2  # in place of the token behind a row of a batch: its hidden states are pooled
ON_DEVICE = -1  # in place of a token of a batch: the device knows it, or guesses it
FEW = 16  # queries of a row that share a key head
NO_LANES = Lanes()
VECTOR = 16  # float32 numbers of a CPU's widest vector
# a running softmax's highest scores and totals, one of each query, and sums of values [K,B,queries,U]
Sums = tuple[Float[Array, "K B queries ..."], ...]
# a layer's keys and values; a latent layer has keys only, and what these are chosen by where they are
Pools = tuple[Pool, Shaped[Array, "K P W values"] | QuantisedPool | None]
NewRows = Float[Array, "B T _ _"]  # new keys or values; a pool may have several heads side by side
Places = tuple[Int[Array, "B T"], Int[Array, "B T"]]  # of tokens: their pages, and where in these
# of a block of some rows; the heads of a latent layer are more than its pool has
Block = tuple[Float[Array, "heads rows S size"], Float[Array, "heads rows S U"]]


@pytree
class KVCache:
    """A pool of pages per layer, head-major; position p of a row is slot p % W of its page p // W.

    Layers of one window have pools of the same number of pages and share a page table. A latent layer has
    keys only, and what these are chosen by in the place of values, if they are; a recurrent one a pool of
    states, in place of keys or beside them; one that reads another's keys has none. Every array of a pool
    has the heads as its first axis and the pages as its second.
    """

    k: tuple[Any, ...]  # L of [K,P,W,H] or None
    v: tuple[Any, ...]  # L of [K,P,W,H] or None
    states: tuple[Any, ...] = ()  # L of StatePool or None
    isa: str | None = static(None)  # instruction set of the CPU kernels that read it, if any do


@pytree
class Batch:
    """All that a step is told of its rows. Positions, write slots, masks and lengths follow from it.

    A row's first token may be ON_DEVICE: the last one sampled in its slot, which the host need not know yet.
    Behind it ON_DEVICE stands for a guess that the program makes itself.
    """

    tokens: Any  # int32 [B,T], padded on the right
    start: Any  # int32 [B], tokens before them: in the cache, or written by earlier rows of the step
    count: Any  # int32 [B], real tokens among the T; 0 is an empty row
    # int32 [B,M] for each window: the row's pages in order, any number where none is read
    page_tables: tuple[Any, ...]
    slot: Any  # int32 [B], which slot of the sampling state the row owns
    # int32 [B], the prompt's token behind the row, negative where there is none or, POOLED, the prompt is
    # embedded; None where nothing is scored
    after: Any = None
    # int32 [rows]: which of the B*T places hold a token, B*T where none; None where all are computed
    packed: Any = None


def positions(batch: Batch) -> Int[Array, "B T"]:
    return batch.start[:, None] + jnp.arange(batch.tokens.shape[1], dtype=jnp.int32)[None]


def row_bytes(kind: LayerKind, kept: Kept, lanes: Lanes = NO_LANES) -> int:
    """Bytes that a token leaves in the cache of a layer."""
    rows = filter(None, kind.keys.cached if kind.keys else ())
    each = (pooled(*row, kept, lanes) for row in rows)
    return sum(heads * head_bytes(size, kept) for heads, size in each)


def page_bytes(
    layers: Sequence[LayerKind], page_size: int, kept: Kept, lanes: Lanes = NO_LANES
) -> tuple[int, ...]:
    """Bytes of one page of each window, keys and values of all its layers together, or their states."""

    def page(window: int | None) -> int:
        if window == STATE:
            return sum(state_bytes(layer.state) for layer in layers if layer.state)
        own = [layer for layer in layers if layer.keys and layer.keys.window == window]
        return sum(row_bytes(layer, kept, lanes) for layer in own) * page_size

    return tuple(map(page, windows_of(layers)))


def empty_cache(
    layers: Sequence[LayerKind],
    pages: Sequence[int],
    page_size: int,
    kept: Kept,
    device: Any = None,
    isa: str | None = None,
    lanes: Lanes = NO_LANES,
) -> KVCache:
    """A cache of zeros for layers, as a device keeps it, with `pages[i]` pages for their i-th window. Rows of
    heads fill whole `lanes`.

    Raises ValueError for a page size that does not fit the blocks that attention reads.
    """
    if page_size < 1 or (BLOCK % page_size and page_size % BLOCK):
        raise ValueError(f"page_size {page_size} must divide {BLOCK} or be a multiple of it")
    count = dict(zip(windows_of(layers), pages, strict=True))

    def pool(kind: LayerKind, i: int) -> Pool | None:
        if kind.keys is None or (row := kind.keys.cached[i]) is None:
            return None
        heads, size = pooled(*row, kept, lanes)
        return empty_pool((heads, count[kind.keys.window], page_size, size), kept, device)

    def states(kind: LayerKind) -> StatePool | None:
        return kind.state and empty_states(kind.state, count[STATE], page_size)

    keys, values = (tuple(pool(kind, i) for kind in layers) for i in range(2))
    return KVCache(keys, values, tuple(map(states, layers)), isa)


def pooled(K: int, H: int, kept: Kept, lanes: Lanes) -> tuple[int, int]:
    """Number and size of a token's rows in a pool, of K heads of H numbers each: a row has several heads, or
    one with zeros behind it, as in 8 bits, where each head has a scale."""
    own = K // gcd(K, lanes.devices)  # heads of one device
    n = 1 if isinstance(kept, Scheme) else side_by_side(own, H, lanes.size)
    return K // n, filling(n * H, lanes.size)


def side_by_side(K: int, H: int, lanes: int) -> int:
    """Least number of heads, of K with H numbers each, that fill whole lanes together; 1 if none does."""
    n = lanes // gcd(H, lanes)
    return n if K % n == 0 else 1


def in_lanes(
    attend: Callable[[Float[Array, "B T N H"]], Float[Array, "B T N U"]],
    q: Float[Array, "B T N own"],
    pool: Pool,
    heads: int,
) -> Float[Array, "B T N values"]:
    """Attention over a pool in which a token's heads may lie several side by side, or have zeros behind them:
    queries have zeros there."""
    (B, T, N, H), K, size = q.shape, pool.shape[0], pool.shape[-1]
    if size == H:
        return attend(q)
    n = heads // K
    if n == 1:
        return attend(widened(q, size))[..., :H]
    own = jnp.expand_dims(jnp.eye(n, dtype=q.dtype), (0, 1, 2, 4, 6))
    out = attend((q.reshape(B, T, K, n, -1, 1, H) * own).reshape(B, T, N, size))
    each = out.reshape(B, T, K, n, -1, n, H)
    return jnp.stack([each[:, :, :, i, :, i] for i in range(n)], axis=3).reshape(B, T, N, H)


def widened(x: Float[Array, "*heads own"], size: int) -> Float[Array, "*heads size"]:
    """Rows with zeros behind them."""
    return jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, size - x.shape[-1]),))


def as_pooled(pool: Pool, new: NewRows) -> Float[Array, "B T K H"]:
    """New heads as they lie in their pool."""
    K, size = pool.shape[0], pool.shape[-1]
    if new.shape[2] == K and new.shape[3] != size:
        return widened(new, size)
    return new.reshape(*new.shape[:2], K, size)


def write(
    pool: Pool, page: Int[Array, "B T"], offset: Int[Array, "B T"], new: Float[Array, "B T K H"]
) -> Pool:
    """Put new keys or values into a pool, each at a place of its own; a page number past the pool drops its
    token."""
    return split_heads(write_heads, pool, (page, offset), new, axis=2)


def write_heads(
    pool: Pool, page: Int[Array, "B T"], offset: Int[Array, "B T"], new: Float[Array, "B T K H"]
) -> Pool:
    """The same with all heads here."""
    # a slice here costs a TPU a copy of the pool
    head = jnp.arange(pool.shape[0], dtype=jnp.int32)[:, None, None]

    def put(own: Shaped[Array, "K P W ..."], new: Shaped[Array, "B T K ..."]) -> Shaped[Array, "K P W ..."]:
        new = as_dtype(jnp.moveaxis(new, 2, 0), own.dtype)
        return own.at[head, page[None], offset[None]].set(new, mode="drop", unique_indices=True)

    return jax.tree.map(put, pool, encoded(pool, new))


def read_block(
    pool: Pool, page_table: Int[Array, "B M"], j: Int[Array, " B"], dtype: Any
) -> Float[Array, "K B S H"]:
    """Positions [j*BLOCK, (j+1)*BLOCK) of every row, j its own; past the table its last page is read."""
    K, _, W, _ = pool.shape
    per_block, per_page = max(1, BLOCK // W), max(1, W // BLOCK)
    entry = (j // per_page * per_block)[:, None] + jnp.arange(per_block, dtype=jnp.int32)[None]
    page = jnp.take_along_axis(page_table, entry, axis=1, mode="clip")
    page = page * per_page + (j % per_page)[:, None]

    def block(own: Shaped[Array, "K P W ..."]) -> Shaped[Array, "K B S ..."]:
        rest = own.shape[3:]
        blocks = own.reshape(K, -1, W // per_page, *rest)  # a page of several blocks is several small pages
        return blocks[:, page].reshape(K, len(j), BLOCK, *rest)

    return decoded(jax.tree.map(block, pool), dtype)


def read_keys(
    pools: Pools,
    page_table: Int[Array, "B M"],
    reading: AttentionParams,
    dtype: Any,
    rows: Int[Array, " rows"],
    j: Int[Array, " rows"],
) -> Block:
    """Keys and values of block j of some rows; a latent layer's are made here."""
    keys = read_block(pools[0], page_table[rows], j, dtype)
    if reading.expand is None:
        return keys, read_values(pools, page_table, dtype, rows, j)
    return made_of(keys, rows, reading.expand)


def made_of(keys: Float[Array, "1 rows S H"], rows: Int[Array, " rows"], expand: Expand) -> Block:
    """Every head's keys and values of a block of what the cache has of some rows."""
    k, v = expand(keys.transpose(1, 2, 0, 3), rows)
    return k.transpose(2, 0, 1, 3), v.transpose(2, 0, 1, 3)


def read_values(
    pools: Pools, page_table: Int[Array, "B M"], dtype: Any, rows: Int[Array, " rows"], j: Int[Array, " rows"]
) -> Float[Array, "K rows S values"]:
    """Values of block j of some rows, or what a latent layer's keys are chosen by."""
    assert pools[1] is not None
    return read_block(pools[1], page_table[rows], j, dtype)


def running_softmax(
    q: Float[Array, "B T N H"],
    batch: Batch,
    read: Callable[[Int[Array, " rows"], Int[Array, " rows"]], Block],
    reading: AttentionParams,
    chosen: SelectedKeys | None = None,
) -> Float[Array, "B T N U"]:
    """Attention over the rows' keys, of which `read(rows, j)` returns block j of some rows.

    Rows go in groups of like length, longest first, so that few wait for the longest; a group's blocks stay
    in a CPU's cache.
    """
    B, T, N, _ = q.shape
    k, v = jax.eval_shape(read, batch.start, batch.start)
    K, U, G = k.shape[0], v.shape[-1], N // k.shape[0]
    end = batch.start + batch.count
    low = reading.first(batch.start)
    # each row begins at its own: a window spans few blocks, wherever its neighbours are
    first = jnp.maximum(low, 0) // BLOCK
    groups = by_length(jnp.where(batch.count > 0, (end + BLOCK - 1) // BLOCK - first, 0), T)
    q = groups.sorted(grouped(q, K).transpose(2, 0, 1, 3, 4).reshape(K, B, T * G, -1))
    pos = jnp.repeat(positions(batch), G, axis=1)  # [B,T*G]

    def block(i: Int[Array, ""], sums: Sums) -> Sums:
        group, rows, j = groups.step(i)
        at = (first[rows] + j)[:, None] * BLOCK + jnp.arange(BLOCK, dtype=jnp.int32)[None]  # [R,BLOCK]
        k, v = read(rows, first[rows] + j)
        # pages before the window and a page's unwritten tail may hold anything
        written = (at >= low[rows, None]) & (at < end[rows, None])
        v = jnp.where(written[None, ..., None], v, 0)
        scores = reading.scores(products(groups.own(q, group), k))
        sees = reading.sees(pos[rows, :, None], at[:, None])
        if chosen is not None:
            sees &= jnp.repeat(chosen.sees(rows, j, BLOCK), G, axis=1)
        scores = jnp.where(sees[None], scores, UNSEEN)
        top, total, out = (groups.own(x, group) for x in sums)
        new_top = jnp.maximum(top, scores.max(-1))
        fade, weights = exp_by_vectors(top - new_top), jnp.exp(scores - new_top[..., None])
        add = einsum("kbqs,kbsu->kbqu", weights.astype(v.dtype), v, jnp.float32)
        new = new_top, total * fade + weights.sum(-1), out * fade[..., None] + add
        return tuple(groups.put(x, y, group) for x, y in zip(sums, new, strict=True))

    sums = (*before_any_key(reading, (K, B, T, G)), jnp.zeros((K, B, T * G, U)))
    _, total, out = jax.lax.fori_loop(0, groups.until[-1], block, sums)
    out = groups.unsorted(out / jnp.maximum(total, 1e-30)[..., None])
    return out.reshape(K, B, T, G, U).transpose(1, 2, 0, 3, 4).reshape(B, T, N, U)


def exp_by_vectors(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return e**x, with bits that do not depend on x's shape on one device. XLA of jax 0.12 splits a CPU's
    short loops into vectors of several widths, which round differently."""
    if on_several_devices(x):  # a flat row of a split array would be gathered
        return jnp.exp(x)

    def flat(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        row = jax.lax.optimization_barrier(jnp.pad(x.reshape(-1), (0, -x.size % VECTOR)))
        return jax.lax.optimization_barrier(jnp.exp(row))[: x.size].reshape(x.shape)

    return jax.lax.platform_dependent(x, cpu=flat, default=jnp.exp)


def choice(
    reading: AttentionParams, batch: Batch, table: Int[Array, "B M"], W: int, index: Index
) -> SelectedKeys | None:
    """Which keys the rows' queries see, by what `index` reads of their pages; None where they see all."""
    if reading.selection is None:
        return None
    end = jnp.where(batch.count > 0, batch.start + batch.count, 0)
    return choose(reading.selection, positions(batch), end, table.shape[1] * W, index)


def products(q: Float[Array, "K B queries H"], k: Float[Array, "K B S H"]) -> Float32[Array, "K B queries S"]:
    """Queries times keys.

    For few queries a CPU computes keys times queries in half the time; the barrier keeps XLA from swapping
    them back.
    """
    if q.shape[2] > FEW:
        return einsum("kbqh,kbsh->kbqs", q, k, jnp.float32)
    return jax.lax.optimization_barrier(einsum("kbsh,kbqh->kbsq", k, q, jnp.float32)).swapaxes(2, 3)


def before_any_key(
    reading: AttentionParams, shape: tuple[int, int, int, int]
) -> tuple[Float[Array, "K B queries"], Float[Array, "K B queries"]]:
    """The running softmax's highest score and total at the start: nothing, or the sinks."""
    K, B, T, G = shape
    if reading.sinks is None:
        return jnp.full((K, B, T * G), UNSEEN), jnp.zeros((K, B, T * G))
    sinks = reading.sinks.astype(jnp.float32).reshape(K, 1, 1, G)
    return jnp.broadcast_to(sinks, shape).reshape(K, B, T * G), jnp.ones((K, B, T * G))


def new_tokens(batch: Batch) -> Bool[Array, "B T"]:
    """The real tokens of the rows, but for a first one that the row before ends with: a part of a prompt that
    is scored repeats it."""
    (B, T), end = batch.tokens.shape, batch.start + batch.count
    at = jnp.arange(T, dtype=jnp.int32)[None]
    real = at < batch.count[:, None]
    if B == 1 or T == 1:
        return real
    same = (batch.slot[1:] == batch.slot[:-1]) & (batch.start[1:] == end[:-1] - 1)
    return real & ~(jnp.pad(same, (1, 0))[:, None] & (at == 0))


@jax.named_scope("cache_write")
def stored(
    pools: Pools,
    batch: Batch,
    table: Int[Array, "B M"],
    k: NewRows,
    v: NewRows | None,
) -> Pools:
    """A layer's pools with the rows' new keys and values in their pages."""
    return written(pools, places_of(pools, batch, table), k, v)


def written(pools: Pools, place: Places, k: NewRows, v: NewRows | None) -> Pools:
    """The same at places that are known."""

    def put(pool: Pool, new: NewRows) -> Pool:
        return write(pool, *place, as_pooled(pool, new))

    (keys, values) = pools
    keys = put(keys, k)
    if v is not None:
        assert values is not None
        values = put(values, v)
    return keys, values


def places_of(pools: Pools, batch: Batch, table: Int[Array, "B M"]) -> Places:
    """Pages of the rows' new tokens, and their places in these; a page past the pool for one that is not
    written."""
    _, P, W, _ = pools[0].shape
    pos = positions(batch)
    entry = jnp.minimum(pos // W, table.shape[1] - 1)
    return apart(jnp.take_along_axis(table, entry, 1), new_tokens(batch), P), pos % W


def with_layer(pools: tuple[Any, ...], layer: int, pool: Any) -> tuple[Any, ...]:
    return (*pools[:layer], pool, *pools[layer + 1 :])

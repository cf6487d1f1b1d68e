"""Parts of the GPU kernels over pages: queries of a tile, tiles of keys read in place, and the running
softmax."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int, Shaped

from ...model.attention import MASK_VALUE, AttentionParams
from ...model.layers import einsum
from ..quantised import QuantisedPool, dequantise_heads

TILE_KEYS = 64  # keys of one product
LATENT_TILE_KEYS = 32  # keys of one product with latent rows, which are wide
LOG2_E = 1.4426950408889634  # scores are exponents of 2: exp takes nine instructions on a GPU, exp2 one
# state of the running softmax: highest score, total weight, and weighted sum of values of each query
SoftmaxState = tuple[Float[Array, " rows"], Float[Array, " rows"], Float[Array, "rows U"]]
Piece = tuple[int, int]  # part of a head: its first number, and its size


class LayerPages(NamedTuple):
    """Pages of one layer, and the batch rows that read them.

    k, v: pools [K,P,W,H]; a latent layer has no v, as values are a part of its rows
    table: pages of the rows [B,M]
    start: position of each row's first token [B]
    count: real tokens of each row [B]
    tail: for single tokens, keys and values [B,n,K,H] that replace the row's last, and the position [B] from
        which on they do
    rope_queries: RoPE part of a latent layer's queries [B,T,K,G,size]; the queries themselves are then as
        long as a latent
    """

    k: Any
    v: Any
    table: Any
    start: Any
    count: Any
    tail: tuple[Any, Any, Any] | None = None
    rope_queries: Any = None


class Queries(NamedTuple):
    """Queries of one key head, which are the rows of a kernel's products. They read the keys [low, end)."""

    row: Any  # batch row
    head: Any  # key head
    token: Any  # int32 [rows]
    member: Any  # int32 [rows], number of the query head within the key head's
    real: Any  # bool [rows], False for padding
    pos: Any  # int32 [rows]
    low: Any
    end: Any


def tile_size(attention: AttentionParams) -> int:
    """Return the number of keys in a tile."""
    return TILE_KEYS if attention.rank is None else LATENT_TILE_KEYS


def head_pieces(attention: AttentionParams, H: int) -> tuple[Piece, ...]:
    """Return the parts of a head that are multiplied one by one: all of it, or a latent and its RoPE part."""
    return (
        ((0, H),) if attention.rank is None else ((0, attention.rank), (attention.rank, H - attention.rank))
    )


def value_size(q: Float[Array, "*rows H"], attention: AttentionParams) -> int:
    """Return the size of a value."""
    return q.shape[-1] if attention.rank is None else attention.rank


def attention_cost(
    q: Float[Array, "B T K G H"], pages: LayerPages, attention: AttentionParams
) -> pl.CostEstimate:
    """Estimate operations and bytes for a full page table, or window, and half of the new tokens. Lengths are
    not known at compile time."""
    B, T, K, G, H = q.shape
    held, new = pages.table.shape[1] * pages.k.shape[2], (T - 1) / 2
    keys = held - new if attention.window is None else min(held, attention.window + new)
    pairs = int(B * T * K * G * max(keys, 1))
    token = sum(prod(x.shape[3:]) * x.dtype.itemsize for x in jax.tree.leaves(pages[:2]))  # a head's bytes
    return pl.CostEstimate(
        flops=2 * (H + value_size(q, attention)) * pairs,
        transcendentals=pairs,
        bytes_accessed=int(B * K * keys) * token + 2 * q.size * q.dtype.itemsize,
    )


def visible_range(
    start: Any, count: Any, first: Any, tokens: Any, attention: AttentionParams
) -> tuple[Any, Any]:
    """Return the range [low, end) of keys that `tokens` tokens from position `first` on see. It is empty if
    no token is real."""
    low = jnp.maximum(attention.first_visible(first), 0)
    return low, jnp.where(first < start + count, jnp.minimum(start + count, first + tokens), 0)


def locate_tile_queries(
    q: Any, pages: LayerPages, rows: int, tile_index: tuple[Any, Any, Any, Any], attention: AttentionParams
) -> Queries:
    """Return the queries of a tile. `tile_index` is a batch row, a key head, a tile of tokens, and a group of
    the key head's query heads."""
    (_, T, _, G, _), (row, head, tile, members) = q.shape, tile_index
    group = min(rows, pl.next_power_of_2(G))
    member = jnp.arange(rows, dtype=jnp.int32)
    token, member = tile * (rows // group) + member // group, members * group + member % group
    start, count = pages.start[row], pages.count[row]
    low, end = visible_range(start, count, start + tile * (rows // group), rows // group, attention)
    real = (token < T) & (member < G)
    return Queries(row, head, token, jnp.where(real, member, G), real, start + token, low, end)


def attend_tiles(
    q: Any,
    pages: LayerPages,
    queries: Queries,
    tiles: tuple[Any, Any],
    before: Any,
    attention: AttentionParams,
) -> SoftmaxState:
    """Run the softmax of the queries over a range of tiles of keys, from the state `before`."""
    query_indices = (
        queries.row,
        jnp.minimum(queries.token, q.shape[1] - 1),
        queries.head,
        jnp.minimum(queries.member, q.shape[3] - 1),
    )
    parts, size = head_pieces(attention, pages.k.shape[-1]), tile_size(attention)
    rows = [
        load_piece(q, *query_indices, piece=piece)
        for piece in parts[: 1 if pages.rope_queries is not None else None]
    ]
    if pages.rope_queries is not None:
        rows.append(load_piece(pages.rope_queries, *query_indices, piece=(0, parts[1][1])))

    def attend_tile(j: Any, state: Any) -> Any:
        """Add tile j of the keys to the softmax state."""
        keys = j * size + jnp.arange(size, dtype=jnp.int32)
        k, v = load_kv_tile(pages, queries, keys, parts, q.dtype)
        products = [einsum("qh,sh->qs", x, y, jnp.float32) for x, y in zip(rows, k, strict=True)]
        scores = products[0] if len(products) == 1 else products[0] + products[1]
        scores = jnp.where(
            attention.mask(queries.pos[:, None], keys[None]), base_2_scores(scores, attention), MASK_VALUE
        )
        top, total, out = state
        new_top = jnp.maximum(top, scores.max(-1))
        fade, weights = jnp.exp2(top - new_top), jnp.exp2(scores - new_top[:, None])
        add = einsum("qs,su->qu", weights.astype(v.dtype), v, jnp.float32)
        return new_top, total * fade + weights.sum(-1), out * fade[:, None] + add

    return jax.lax.fori_loop(*tiles, attend_tile, before)


def base_2_scores(products: Float[Array, "rows S"], attention: AttentionParams) -> Float[Array, "rows S"]:
    """Return scores as exponents of 2. Without a softcap, scale and base are one factor."""
    if attention.softcap is None:
        return products * (attention.scale * LOG2_E)
    return attention.scores(products) * LOG2_E


def load_kv_tile(
    pages: LayerPages, queries: Queries, keys: Int[Array, " S"], parts: Sequence[Piece], dtype: Any
) -> tuple[list[Float[Array, "S _"]], Float[Array, "S _"]]:
    """Load the pieces of keys, and the values, at some positions. A position that no query sees is replaced
    by the nearest one that is seen. A latent layer's values are the first piece of its keys."""
    W, keys = pages.k.shape[2], jnp.clip(keys, queries.low, queries.end - 1)
    *tail, root = (
        (None, None, queries.end) if pages.tail is None else (*pages.tail[:2], pages.tail[2][queries.row])
    )
    old = keys if pages.tail is None else jnp.maximum(jnp.minimum(keys, root - 1), 0)
    page = pages.table[queries.row, old // W]

    def read(i: int, piece: Piece) -> Float[Array, "S _"]:
        """Load a piece of keys (i = 0) or values (i = 1), from pages or from the row's own newest."""
        paged_heads = load_pool_piece(pages[i], queries.head, page, old % W, piece=piece, dtype=dtype)
        if pages.tail is None:
            return paged_heads
        new = load_piece(tail[i], queries.row, jnp.maximum(keys - root, 0), queries.head, piece=piece)
        return jnp.where((keys >= root)[:, None], new, paged_heads)

    k = [read(0, piece) for piece in parts]
    return k, k[0] if pages.v is None else read(1, parts[0])


def load_pool_piece(pool: Any, *indices: Any, piece: Piece, dtype: Any) -> Float[Array, "S size"]:
    """Load a piece of the heads at vectors of indices. Codes are decoded to numbers of `dtype`."""
    if not isinstance(pool, QuantisedPool):
        return load_piece(pool, *indices, piece=piece)
    codes = load_piece(pool.values, *indices, piece=piece)
    return dequantise_heads(QuantisedPool(codes, pool.scales[indices], pool.scheme), dtype)


def load_piece(
    ref: Any, *indices: Any, piece: Piece, mask: Bool[Array, "*rows"] | None = None
) -> Shaped[Array, "*rows size"]:
    """Load a piece of the heads at vectors of indices; zeros where the mask is false. Sizes in a kernel are
    powers of two, so zeros follow a piece."""
    first, size = piece
    width = pl.next_power_of_2(size)
    if mask is None and size == width == ref.shape[-1]:
        return ref[(*indices, slice(None))]
    at = jnp.arange(width, dtype=jnp.int32)
    index = (*(i[..., None] if jnp.ndim(i) else i for i in indices), first + at)
    shape = jnp.broadcast_shapes(*map(jnp.shape, index))
    index = tuple(jnp.broadcast_to(i, shape) if jnp.ndim(i) else i for i in index)
    is_loaded = None if width == size else jnp.broadcast_to(at < size, shape)
    if mask is not None:
        mask = jnp.broadcast_to(mask[..., None], shape)
        is_loaded = mask if is_loaded is None else is_loaded & mask
    return triton.load(
        ref.at[index], mask=is_loaded, other=None if is_loaded is None else jnp.zeros((), ref.dtype)
    )


def initial_tile_softmax(queries: Queries, sinks: Any, U: int) -> SoftmaxState:
    """Return the softmax state before the first key: empty, or the sinks."""
    rows = queries.token.shape[0]
    out = jnp.zeros((rows, pl.next_power_of_2(U)), jnp.float32)
    if sinks is None:
        return jnp.full(rows, MASK_VALUE, jnp.float32), jnp.zeros(rows, jnp.float32), out
    member = jnp.minimum(queries.member, sinks.shape[1] - 1)
    return sinks[queries.head, member] * LOG2_E, jnp.ones(rows, jnp.float32), out


def merge_softmax_parts(
    state: SoftmaxState, sums: Sequence[Any], queries: Queries, part: Int[Array, " parts"], end: Any
) -> SoftmaxState:
    """Add the softmax states of some parts of a row to another state. Parts from number `end` on are not
    read."""
    shape = (len(part), len(queries.member))
    member = jnp.minimum(queries.member, sums[0].shape[3] - 1)
    indices = (
        queries.row,
        queries.head,
        jnp.broadcast_to(part[:, None], shape),
        jnp.broadcast_to(member[None], shape),
    )
    is_read = jnp.broadcast_to((part < end)[:, None], shape)
    tops, totals = (
        triton.load(ref.at[indices], mask=is_read, other=nothing)
        for ref, nothing in zip(sums, (MASK_VALUE, 0.0), strict=False)
    )
    values = load_piece(sums[2], *indices, piece=(0, sums[2].shape[-1]), mask=is_read)
    top = jnp.maximum(state[0], tops.max(0))
    fade, weights = jnp.exp2(state[0] - top), jnp.exp2(tops - top[None])
    out = state[2] * fade[:, None] + (weights[..., None] * values).sum(0)
    return top, state[1] * fade + (weights * totals).sum(0), out


def divide_by_total(out: Float[Array, "rows U"], total: Float[Array, " rows"]) -> Float[Array, "rows U"]:
    """Divide the weighted sums of values by their total weights."""
    return out / jnp.maximum(total, 1e-30)[:, None]


def store_piece(
    ref: Any,
    *indices: Any,
    value: Float[Array, "rows ..."],
    mask: Bool[Array, " rows"],
    piece: Piece | None = None,
):
    """Write numbers, heads, or a piece of heads, at vectors of indices, where the mask is true. The padding
    behind a head is not written."""
    if value.ndim > 1:  # Pallas' interpreter does not mix vectors and slices in stores
        first, size = piece or (0, ref.shape[-1])
        at = jnp.arange(value.shape[1], dtype=jnp.int32)[None]
        indices = (*(i[:, None] if jnp.ndim(i) else i for i in indices), first + at)
        mask = jnp.broadcast_to(mask[:, None] & (at < size), value.shape)
    triton.store(ref.at[indices], value.astype(ref.dtype), mask=mask)

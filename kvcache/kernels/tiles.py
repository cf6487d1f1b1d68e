"""Inside a kernel over pages: the queries of a tile, tiles of keys where they lie, and the running softmax
over them."""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int, Shaped

from ...model.attention import UNSEEN, AttentionParams
from ...model.layers import einsum
from ..quantised import QuantisedPool, decoded

TILE = 64  # keys of one product
LATENT_TILE = 32  # of latent rows, which are wide
LOG2_E = 1.4426950408889634  # scores are exponents of 2: exp is nine instructions of a GPU, exp2 one
# of each query: its highest score, its total, and its weighted values
Running = tuple[Float[Array, " rows"], Float[Array, " rows"], Float[Array, "rows U"]]
Piece = tuple[int, int]  # of a head: its first number, and how many there are


class LayerPages(NamedTuple):
    """A layer's pools [K,P,W,H], the rows' pages [B,M], where their T tokens begin [B], and how many are real
    [B]. A latent layer has no values: they are a part of its rows.

    `own` is for single tokens: keys and values [B,n,K,H] that stand for the last of a row's, from a position
    [B] on. `turned` is the rest [B,T,K,G,size] of a latent layer's queries, which are then as long as a
    latent.
    """

    k: Any
    v: Any
    table: Any
    start: Any
    count: Any
    own: tuple[Any, Any, Any] | None = None
    turned: Any = None


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


def tile_of(reading: AttentionParams) -> int:
    return TILE if reading.rank is None else LATENT_TILE


def pieces(reading: AttentionParams, H: int) -> tuple[Piece, ...]:
    """The parts of a head that are multiplied one by one: all of it, or a latent and its turned key."""
    return ((0, H),) if reading.rank is None else ((0, reading.rank), (reading.rank, H - reading.rank))


def value_size(q: Float[Array, "*rows H"], reading: AttentionParams) -> int:
    return q.shape[-1] if reading.rank is None else reading.rank


def cost(q: Float[Array, "B T K G H"], pages: LayerPages, reading: AttentionParams) -> pl.CostEstimate:
    """Operations and bytes of a full table, or window, and half of the new tokens: lengths are not known."""
    B, T, K, G, H = q.shape
    held, new = pages.table.shape[1] * pages.k.shape[2], (T - 1) / 2
    keys = held - new if reading.window is None else min(held, reading.window + new)
    pairs = int(B * T * K * G * max(keys, 1))
    token = sum(prod(x.shape[3:]) * x.dtype.itemsize for x in jax.tree.leaves(pages[:2]))  # a head's bytes
    return pl.CostEstimate(
        flops=2 * (H + value_size(q, reading)) * pairs,
        transcendentals=pairs,
        bytes_accessed=int(B * K * keys) * token + 2 * q.size * q.dtype.itemsize,
    )


def seen(start: Any, count: Any, first: Any, tokens: Any, reading: AttentionParams) -> tuple[Any, Any]:
    """The range [low, end) of keys that `tokens` tokens from position `first` on read; empty if no token is
    real."""
    low = jnp.maximum(reading.first(first), 0)
    return low, jnp.where(first < start + count, jnp.minimum(start + count, first + tokens), 0)


def queries_of(
    q: Any, pages: LayerPages, rows: int, place: tuple[Any, Any, Any, Any], reading: AttentionParams
) -> Queries:
    """The queries of a row of the batch, a key head, a tile of tokens, and one of the key head's query
    heads."""
    (_, T, _, G, _), (row, head, tile, members) = q.shape, place
    group = min(rows, pl.next_power_of_2(G))
    member = jnp.arange(rows, dtype=jnp.int32)
    token, member = tile * (rows // group) + member // group, members * group + member % group
    start, count = pages.start[row], pages.count[row]
    low, end = seen(start, count, start + tile * (rows // group), rows // group, reading)
    real = (token < T) & (member < G)
    return Queries(row, head, token, jnp.where(real, member, G), real, start + token, low, end)


def over_keys(
    q: Any, pages: LayerPages, at: Queries, tiles: tuple[Any, Any], before: Any, reading: AttentionParams
) -> Running:
    """The running softmax of the queries over some tiles of keys."""
    place = at.row, jnp.minimum(at.token, q.shape[1] - 1), at.head, jnp.minimum(at.member, q.shape[3] - 1)
    parts, size = pieces(reading, pages.k.shape[-1]), tile_of(reading)
    rows = [load(q, *place, piece=piece) for piece in parts[: 1 if pages.turned is not None else None]]
    if pages.turned is not None:
        rows.append(load(pages.turned, *place, piece=(0, parts[1][1])))

    def tile(j: Any, state: Any) -> Any:
        keys = j * size + jnp.arange(size, dtype=jnp.int32)
        k, v = load_keys(pages, at, keys, parts, q.dtype)
        products = [einsum("qh,sh->qs", x, y, jnp.float32) for x, y in zip(rows, k, strict=True)]
        scores = products[0] if len(products) == 1 else products[0] + products[1]
        scores = jnp.where(reading.sees(at.pos[:, None], keys[None]), in_base_2(scores, reading), UNSEEN)
        top, total, out = state
        new_top = jnp.maximum(top, scores.max(-1))
        fade, weights = jnp.exp2(top - new_top), jnp.exp2(scores - new_top[:, None])
        add = einsum("qs,su->qu", weights.astype(v.dtype), v, jnp.float32)
        return new_top, total * fade + weights.sum(-1), out * fade[:, None] + add

    return jax.lax.fori_loop(*tiles, tile, before)


def in_base_2(products: Float[Array, "rows S"], reading: AttentionParams) -> Float[Array, "rows S"]:
    """The scores as exponents of 2; scale and base are one factor where no cap is between them."""
    if reading.softcap is None:
        return products * (reading.scale * LOG2_E)
    return reading.scores(products) * LOG2_E


def load_keys(
    pages: LayerPages, at: Queries, keys: Int[Array, " S"], parts: Sequence[Piece], dtype: Any
) -> tuple[list[Float[Array, "S _"]], Float[Array, "S _"]]:
    """The pieces of keys, and the values, of positions, or of the nearest ones that are seen: others may hold
    anything. A latent layer's values are its keys' first piece."""
    W, keys = pages.k.shape[2], jnp.clip(keys, at.low, at.end - 1)
    *own, root = (None, None, at.end) if pages.own is None else (*pages.own[:2], pages.own[2][at.row])
    old = keys if pages.own is None else jnp.maximum(jnp.minimum(keys, root - 1), 0)
    page = pages.table[at.row, old // W]

    def read(i: int, piece: Piece) -> Float[Array, "S _"]:
        found = load_pool(pages[i], at.head, page, old % W, piece=piece, dtype=dtype)
        if pages.own is None:
            return found
        new = load(own[i], at.row, jnp.maximum(keys - root, 0), at.head, piece=piece)
        return jnp.where((keys >= root)[:, None], new, found)

    k = [read(0, piece) for piece in parts]
    return k, k[0] if pages.v is None else read(1, parts[0])


def load_pool(pool: Any, *place: Any, piece: Piece, dtype: Any) -> Float[Array, "S size"]:
    """A piece of the heads at vectors of places, as numbers where the pool has codes."""
    if not isinstance(pool, QuantisedPool):
        return load(pool, *place, piece=piece)
    codes = load(pool.values, *place, piece=piece)
    return decoded(QuantisedPool(codes, pool.scales[place], pool.scheme), dtype)


def load(
    ref: Any, *place: Any, piece: Piece, mask: Bool[Array, "*rows"] | None = None
) -> Shaped[Array, "*rows size"]:
    """A piece of the heads at vectors of places, zeros where the mask is false. Sizes in a kernel are powers
    of two: zeros follow a piece."""
    first, size = piece
    width = pl.next_power_of_2(size)
    if mask is None and size == width == ref.shape[-1]:
        return ref[(*place, slice(None))]
    at = jnp.arange(width, dtype=jnp.int32)
    index = (*(i[..., None] if jnp.ndim(i) else i for i in place), first + at)
    shape = jnp.broadcast_shapes(*map(jnp.shape, index))
    index = tuple(jnp.broadcast_to(i, shape) if jnp.ndim(i) else i for i in index)
    here = None if width == size else jnp.broadcast_to(at < size, shape)
    if mask is not None:
        mask = jnp.broadcast_to(mask[..., None], shape)
        here = mask if here is None else here & mask
    return triton.load(ref.at[index], mask=here, other=None if here is None else jnp.zeros((), ref.dtype))


def no_keys(at: Queries, sinks: Any, U: int) -> Running:
    """The running softmax before any key: nothing, or the sinks."""
    rows = at.token.shape[0]
    out = jnp.zeros((rows, pl.next_power_of_2(U)), jnp.float32)
    if sinks is None:
        return jnp.full(rows, UNSEEN, jnp.float32), jnp.zeros(rows, jnp.float32), out
    member = jnp.minimum(at.member, sinks.shape[1] - 1)
    return sinks[at.head, member] * LOG2_E, jnp.ones(rows, jnp.float32), out


def add_parts(
    one: Running, sums: Sequence[Any], at: Queries, part: Int[Array, " parts"], end: Any
) -> Running:
    """The running softmax over the keys of another and of parts of a row before `end`; the others are not
    read."""
    shape = (len(part), len(at.member))
    member = jnp.minimum(at.member, sums[0].shape[3] - 1)
    place = at.row, at.head, jnp.broadcast_to(part[:, None], shape), jnp.broadcast_to(member[None], shape)
    here = jnp.broadcast_to((part < end)[:, None], shape)
    tops, totals = (
        triton.load(ref.at[place], mask=here, other=nothing)
        for ref, nothing in zip(sums, (UNSEEN, 0.0), strict=False)
    )
    found = load(sums[2], *place, piece=(0, sums[2].shape[-1]), mask=here)
    top = jnp.maximum(one[0], tops.max(0))
    fade, weights = jnp.exp2(one[0] - top), jnp.exp2(tops - top[None])
    out = one[2] * fade[:, None] + (weights[..., None] * found).sum(0)
    return top, one[1] * fade + (weights * totals).sum(0), out


def quotient(out: Float[Array, "rows U"], total: Float[Array, " rows"]) -> Float[Array, "rows U"]:
    return out / jnp.maximum(total, 1e-30)[:, None]


def store(
    ref: Any,
    *index: Any,
    value: Float[Array, "rows ..."],
    mask: Bool[Array, " rows"],
    piece: Piece | None = None,
):
    """Write numbers, or heads of rows or a piece of them, at vectors of indices, where the mask is true and a
    head has numbers."""
    if value.ndim > 1:  # interpreted stores do not mix vectors and slices
        first, size = piece or (0, ref.shape[-1])
        at = jnp.arange(value.shape[1], dtype=jnp.int32)[None]
        index = (*(i[:, None] if jnp.ndim(i) else i for i in index), first + at)
        mask = jnp.broadcast_to(mask[:, None] & (at < size), value.shape)
    triton.store(ref.at[index], value.astype(ref.dtype), mask=mask)

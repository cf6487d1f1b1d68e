"""Inside a kernel over pages: the queries of a tile, tiles of keys where they lie, and the running softmax
over them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from ..model.attention import UNSEEN, Reading
from ..model.layers import einsum

TILE = 64  # keys of one product
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
        scores = jnp.where(reading.sees(at.pos[:, None], keys[None]), scores, UNSEEN)
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
    place = keys - root[at.row]
    old = jnp.maximum(jnp.minimum(keys, root[at.row] - 1), 0)
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
        return jnp.full(rows, UNSEEN, jnp.float32), jnp.zeros(rows, jnp.float32), out
    return of_members(sinks, at, at.head), jnp.ones(rows, jnp.float32), out


def of_members(ref: Any, at: Queries, *place: Any) -> Float[Array, "rows ..."]:
    """What a reference [..., G] or [..., G, H] has at a place for each query."""
    group = ref.shape[len(place)]
    return ref[(*place, jnp.minimum(at.member, group - 1), *(slice(None),) * (ref.ndim - len(place) - 1))]


def added(one: Running, other: Sequence[Float[Array, "rows ..."]]) -> Running:
    """The running softmax over the keys of two."""
    top = jnp.maximum(one[0], other[0])
    a, b = jnp.exp(one[0] - top), jnp.exp(other[0] - top)
    return top, one[1] * a + other[1] * b, one[2] * a[:, None] + other[2] * b[:, None]


def quotient(out: Float[Array, "rows H"], total: Float[Array, " rows"]) -> Float[Array, "rows H"]:
    return out / jnp.maximum(total, 1e-30)[:, None]


def store(ref: Any, *index: Any, value: Float[Array, "rows ..."], mask: Bool[Array, " rows"]):
    """Write numbers or heads of rows at vectors of indices, where the mask is true."""
    if value.ndim > 1:  # interpreted stores do not mix vectors and slices
        index = (
            *(i[:, None] if jnp.ndim(i) else i for i in index),
            jnp.arange(value.shape[1], dtype=jnp.int32)[None],
        )
        mask = jnp.broadcast_to(mask[:, None], value.shape)
    triton.store(ref.at[index], value.astype(ref.dtype), mask=mask)

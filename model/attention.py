"""Grouped-query attention: its parameters, the seam to caches, and the reference over contiguous keys."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, UInt32

from .config import GroupedQuery, NormKind
from .layers import Norm, NormWeight, biased, einsum, einsums, normalise, rounded, softcapped
from .recurrent.states import Recurrence, RecurrentInputs, empty_state
from .rope import Rotation, rotate
from .tree import Spec, pytree, static

UNSEEN = -1e30  # score of a key that a query does not see; finite, so that nothing becomes NaN
Keys = Float[Array, "B T K H"] | Float[Array, "B T 1 row"]  # of new tokens; a latent layer's are its rows
Values = Float[Array, "B T K H"] | Float[Array, "B T 1 size"]  # or what a latent layer's keys are chosen by
LatentRows = Float[Array, "B S 1 row"]  # of a latent layer's cache
Holds = Callable[[UInt32[Array, "B T S"], UInt32[Array, "1 1 S"]], Bool[Array, "B T S"]]  # of order and place
Count = Callable[[Holds], Int[Array, "B T"]]
Made = tuple[Float[Array, "B S K H"], Float[Array, "B S K U"]]  # keys and values that are made of such rows
Expand = Callable[[LatentRows, Int[Array, " B"]], Made]  # of these rows of the batch


@pytree
class Attention:
    """Projections of grouped-query attention; what the family does not have is None."""

    q: Any  # [D,N,H]; where it is `FusedQKV`, k and v are None
    k: Any  # [D,K,H], None where the layer reads another's keys and values
    v: Any  # [D,K,H], None there, and where values are made as keys are
    o: Any  # [N,H,D]
    q_bias: Any = None  # [N,H]
    k_bias: Any = None  # [K,H]
    v_bias: Any = None  # [K,H]
    o_bias: Any = None  # [D]
    q_norm: Any = None  # [H], or [N,H] where heads have gains of their own
    k_norm: Any = None  # [H], or [K,H]
    sinks: Any = None  # [N]
    gate: Any = None  # [D,N,H]
    gate_bias: Any = None  # [N,H]

    @property
    def has_keys(self) -> bool:
        """False where the layer reads another's keys and values."""
        return self.k is not None or isinstance(self.q, FusedQKV)


@pytree
class FusedQKV:
    """Projections to queries, keys and values, side by side. heads: number of heads of each."""

    array: Any  # [D,N+2K,H]
    heads: tuple[int, ...] = static(())

    @property
    def parts(self) -> tuple[Any, Any, Any]:
        """The three projections: copies, views of a host's array, or ShapeDtypeStructs."""
        q, k = np.cumsum(self.heads[:-1])
        if not isinstance(self.array, jax.ShapeDtypeStruct):
            return self.array[:, :q], self.array[:, q:k], self.array[:, k:]
        (D, _, H), place = self.array.shape, self.array.sharding
        q, k, v = (jax.ShapeDtypeStruct((D, n, H), self.array.dtype, sharding=place) for n in self.heads)
        return q, k, v

    def heads_of(self, x: Float[Array, "B T D"]) -> list[Float[Array, "B T _ H"]]:
        """Queries, keys and values of x: columns of a matrix, so that XLA drops the split where `NewHeads`
        puts them side by side."""
        (B, T, _), H = x.shape, self.array.shape[2]
        rows = einsum("btd,dnh->btnh", x, self.array).reshape(B * T, -1)
        parts = jnp.split(rows, H * np.cumsum(self.heads[:-1]), axis=1)
        return [part.reshape(B, T, -1, H) for part in parts]


@dataclass(frozen=True)
class Selection:
    """Each query sees the `keys` of the keys before it that score highest, of equal ones the first.

    A key's score is the sum over heads of `weights` times its product with `q` where that is above 0 (the
    lightning indexer of DeepSeek-V3.2, arXiv 2512.02556).
    """

    q: Float[Array, "B T heads size"]
    weights: Float32[Array, "B T heads"]
    keys: int

    def order(self, k: Float[Array, "B S size"]) -> UInt32[Array, "B T S"]:
        """Whole numbers above 0 that are ordered as the scores are, and equal where they are."""
        k = k[..., : self.q.shape[-1]]  # a pool may have zeros behind its rows
        products = jax.nn.relu(einsum("bthi,bsi->bths", self.q, k, jnp.float32))
        scores = rounded(products * self.weights[..., None]).sum(2)
        bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)
        return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))

    def bounds(self, places: int, count: Count) -> "TopKBounds":
        """Bounds of the selected keys among `places` positions. `count(holds)` returns for how many keys of
        each query a predicate of (order, position) holds; a hidden key has order 0."""

        def is_reached(x: UInt32[Array, "B T"]) -> Bool[Array, "B T"]:
            return count(lambda order, at: order >= x[..., None]) >= self.keys

        least = largest(32, self.q.shape[:2], is_reached)
        room = self.keys - count(lambda order, at: order > least[..., None])

        def is_early(x: UInt32[Array, "B T"]) -> Bool[Array, "B T"]:
            return count(lambda order, at: (order == least[..., None]) & (at < x[..., None])) < room

        return TopKBounds(least, largest(places.bit_length(), self.q.shape[:2], is_early))

    def chosen(self, k: Float[Array, "B S size"], seen: Bool[Array, "B T S"]) -> Bool[Array, "B T S"]:
        """Which keys the queries see, of those that are seen otherwise."""
        order, at = jnp.where(seen, self.order(k), jnp.uint32(0)), places_of(k.shape[1])
        bounds = self.bounds(k.shape[1], lambda holds: holds(order, at).sum(-1, dtype=jnp.int32))
        return seen & bounds.hold(order, at)


class TopKBounds(NamedTuple):
    """Bounds of the selected keys. `least`: their lowest order. `last`: the last position at which a key of
    that order is still selected."""

    least: Any  # uint32 [B,T]
    last: Any  # uint32 [B,T]

    def hold(self, order: UInt32[Array, "B T S"], at: UInt32[Array, "1 1 S"]) -> Bool[Array, "B T S"]:
        least, last = self.least[..., None], self.last[..., None]
        return (order > least) | ((order == least) & (at <= last))


def places_of(S: int, first: Any = 0) -> UInt32[Array, "1 1 S"]:
    return (first + jnp.arange(S, dtype=jnp.int32))[None, None].astype(jnp.uint32)


def largest(
    bits: int, shape: tuple[int, ...], holds: Callable[[UInt32[Array, "B T"]], Bool[Array, "B T"]]
) -> UInt32[Array, "B T"]:
    """The largest `bits`-bit numbers for which `holds`, a predicate that holds for 0 and up to some
    number."""

    def bit(i: Int[Array, ""], found: UInt32[Array, "B T"]) -> UInt32[Array, "B T"]:
        more = found | (jnp.uint32(1 << (bits - 1)) >> i.astype(jnp.uint32))
        return jnp.where(holds(more), more, found)

    return jax.lax.fori_loop(0, bits, bit, jnp.zeros(shape, jnp.uint32))


@dataclass(frozen=True)
class AttentionParams:
    """Parameters of a layer's attention.

    `window`: keys that a query sees, itself included; None is all before it. `chunked`: keys before the last
    multiple of the window are hidden too. `sinks`: scores of seeing nothing. `expand`: makes keys and values
    where a layer caches one kind of row only, from these and the numbers of their rows in the batch. `rank`:
    keys are the cached rows as they are, values the first `rank` numbers of these. `turned`: the rest of the
    queries, which are then as long as `rank`. `selection`: hides all keys but the selected ones. `heads`: key
    heads of a token, of which a cached row may have several.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Float[Array, " N"] | None = None
    expand: Expand | None = None
    rank: int | None = None
    turned: Float[Array, "B T N size"] | None = None
    selection: Selection | None = None
    chunked: bool = False
    heads: int = 1

    @property
    def makes_keys(self) -> bool:
        """True if each head has keys and values of its own, made of cached rows."""
        return self.expand is not None and self.rank is None

    def scores(self, products: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Products of queries and keys as they go into the softmax."""
        return softcapped(products * self.scale, self.softcap)

    def sees(self, query: Int[Array, "*#shape"], key: Int[Array, "*#shape"]) -> Bool[Array, "*#shape"]:
        """Which key positions the query positions see."""
        seen = key <= query
        return seen if self.window is None else seen & (key >= self.first(query))

    def first(self, query: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """The first position that query positions see, which may be below 0 in a window."""
        if self.window is None:
            return 0 * query
        return query - query % self.window if self.chunked else query - (self.window - 1)


@runtime_checkable
class Attend(Protocol):
    """The seam between the model and every cache: stores new keys and values, and attends to all that are
    visible.

    Takes the state, the layer's number, queries, new keys and values, and the layer's attention parameters;
    returns the new state and the attention's output. A latent layer has no values; with a selection, the
    indexer's keys take their place. Without keys, the layer of this number is read again.
    """

    def __call__(
        self,
        state: Any,
        layer: int,
        q: Float[Array, "B T N _"],
        k: Keys | None,
        v: Values | None,
        reading: AttentionParams,
        /,
    ) -> tuple[Any, Float[Array, "B T N U"]]: ...


@pytree
class NewHeads:
    """A layer's queries, keys and values of new tokens as their products make them: queries and keys are to
    be normed, and turned in halves. gains: of queries' and keys' norms."""

    q: Any  # [B,T,N,H]
    k: Any  # [B,T,K,H]
    v: Any  # [B,T,K,H]
    rotary: Rotation
    gains: tuple[Any, Any] = (None, None)  # [H]
    norm: NormKind | None = static(None)

    @property
    def side_by_side(self) -> Float[Array, "B T heads H"]:
        """All heads: of matrices of rows XLA makes one product, and no copy."""
        (B, T, _, H), each = self.q.shape, (self.q, self.k, self.v)
        rows = [x.reshape(-1, prod(x.shape[2:])) for x in each]
        return jnp.concatenate(rows, axis=1).reshape(B, T, -1, H)

    @property
    def normed(self) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
        """Queries and keys, normed."""
        if self.norm is None:
            return self.q, self.k
        q, k = map(as_norm, self.gains)
        return normalise(self.q, q, self.norm), normalise(self.k, k, self.norm)

    @property
    def turned(self) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
        """Queries and keys, normed and turned."""
        q, k = self.normed
        return rotate(q, self.rotary), rotate(k, self.rotary)


@runtime_checkable
class TurningAttend(Attend, Protocol):
    """An attend that may norm, turn and store new heads at once."""

    def turns(self, state: Any, layer: int, q: Float[Array, "B T N H"], norm: NormKind | None, /) -> bool:
        """True if it does so with heads like these queries."""
        ...

    def turned(
        self, state: Any, layer: int, new: NewHeads, reading: AttentionParams, /
    ) -> tuple[Any, Float[Array, "B T N H"]]:
        """The new state and the attention's output."""
        ...


@runtime_checkable
class LatentAttend(Attend, Protocol):
    """An attend that may read a latent layer's rows for many queries as they are."""

    def reads_rows(self, state: Any, layer: int, q: Any, reading: AttentionParams, /) -> bool:
        """True if that takes less than making every head's keys and values."""
        ...


def attention_spec(c: GroupedQuery, D: int, depth: int) -> Attention:
    """The parameters of one layer of `depth`."""

    def optional(here: bool, *sizes: int, axes: tuple[str, ...]) -> Spec | None:
        return Spec(sizes, axes, scale=0.0) if here else None

    def gain(heads: int, axis: str) -> Spec | None:
        if c.qk_norm is None or not c.qk_norm.gain:
            return None
        alike = c.qk_norm_over == "head"
        sizes, axes = ((H,), ("head",)) if alike else ((heads, H), (axis, "head"))
        return Spec(sizes, axes, mean=1.0 - c.qk_norm.offset, scale=0.0)

    N, K, H = c.num_heads, c.num_kv_heads, c.head_size
    keys, values = not c.borrows, not c.borrows and not c.keys_as_values
    made = Spec((D, K, H), ("model", "kv_heads", "head"))
    return Attention(
        q=Spec((D, N, H), ("model", "heads", "head")),
        k=made if keys else None,
        v=made if values else None,
        o=Spec((N, H, D), ("heads", "head", "model"), scale=0.02 / (2 * depth) ** 0.5),
        q_bias=optional(c.bias, N, H, axes=("heads", "head")),
        k_bias=optional(c.bias and keys, K, H, axes=("kv_heads", "head")),
        v_bias=optional(c.bias and values, K, H, axes=("kv_heads", "head")),
        o_bias=optional(c.output_bias, D, axes=("model",)),
        q_norm=gain(N, "heads"),
        k_norm=gain(K, "kv_heads") if keys else None,
        sinks=optional(c.sinks, N, axes=("heads",)),
        gate=Spec((D, N, H), ("model", "heads", "head")) if c.gated else None,
        gate_bias=optional(c.gated and c.bias, N, H, axes=("heads", "head")),
    )


def mix_heads(
    w: Attention,
    c: GroupedQuery,
    x: Float[Array, "B T D"],
    rotary: Rotation | None,
    attend: Attend,
    state: Any,
    i: int,
) -> tuple[Any, Float[Array, "B T D"]]:
    """Attention of layer i over normed x, and attend's new state."""

    def turned(x: Float[Array, "B T heads H"]) -> Float[Array, "B T heads H"]:
        return x if rotary is None or c.rope is None else rotate(x, rotary, c.rope.interleaved)

    def heads(x: Float[Array, "B T heads H"], gain: Any) -> Float[Array, "B T heads H"]:
        if c.norm_turned:
            return normed(turned(x), gain, c)
        return turned(normed(x, gain, c))

    scale = c.head_size**-0.5 if c.scale is None else c.scale
    reading = AttentionParams(scale, c.window, c.softcap, w.sinks, chunked=c.chunked, heads=c.num_kv_heads)
    q, k, v = new_heads(w, x)
    v = v if c.value_norm is None or v is None else normalise(v, Norm(None), c.value_norm)
    turning = attend if turns_plainly(c) and isinstance(attend, TurningAttend) else None
    if turning and k is not None and v is not None and turning.turns(state, i, q, c.qk_norm):
        assert rotary is not None
        new = NewHeads(q, k, v, rotary, (w.q_norm, w.k_norm), c.qk_norm)
        state, out = turning.turned(state, i, new, reading)
    else:
        q, k = grown(heads(q, w.q_norm), rotary), None if k is None else heads(k, w.k_norm)
        state, out = attend(state, i - c.borrows, q, k, v, reading)
    if w.gate is not None:
        out = out * jax.nn.sigmoid(biased(einsum("btd,dnh->btnh", x, w.gate), w.gate_bias))
    return state, biased(einsum("btnh,nhd->btd", out, w.o), w.o_bias)


def new_heads(
    w: Attention, x: Float[Array, "B T D"]
) -> tuple[Float[Array, "B T N H"], Keys | None, Values | None]:
    """Queries, keys and values as projections and biases make them; no keys and values where the layer reads
    another's."""
    if isinstance(w.q, FusedQKV):
        q, k, v = w.q.heads_of(x)
    else:
        q, k, v = einsums("btd,dnh->btnh", x, (w.q, w.k, w.v))
    k = k if k is None else biased(k, w.k_bias)
    return biased(q, w.q_bias), k, k if v is None else biased(v, w.v_bias)


def turns_plainly(c: GroupedQuery) -> bool:
    """True for a layer with keys of its own whose queries and keys are at most normed head by head before
    they are turned in halves."""
    in_halves = c.rope is not None and not c.rope.interleaved and not c.rope.query_growth
    return in_halves and c.qk_norm_over == "head" and not c.norm_turned and not c.borrows


def grown(q: Float[Array, "B T N H"], rotary: Rotation | None) -> Float[Array, "B T N H"]:
    """Queries as their positions make them grow."""
    return q if rotary is None or rotary.growth is None else q * rotary.growth.astype(q.dtype)


def normed(x: Float[Array, "B T heads H"], gain: Any, c: GroupedQuery) -> Float[Array, "B T heads H"]:
    """Queries or keys as their layer norms them."""
    if c.qk_norm is None:
        return x
    return normalise(x, as_norm(gain), c.qk_norm, (-2, -1) if c.qk_norm_over == "all heads" else -1)


def as_norm(gain: Any) -> Norm | NormWeight:
    return gain if isinstance(gain, NormWeight) else Norm(gain)


def grouped(q: Float[Array, "B T N H"], kv_heads: int) -> Float[Array, "B T K G H"]:
    """Query heads grouped by the key head that they share."""
    B, T, N, H = q.shape
    return q.reshape(B, T, kv_heads, N // kv_heads, H)


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K U"],
    mask: Bool[Array, "#B T S"],
    reading: AttentionParams,
) -> Float[Array, "B T N U"]:
    """Softmax attention with scores in float32; every query must see at least one key."""
    B, T, N, _ = q.shape
    products = einsum("btkgh,bskh->bkgts", grouped(q, k.shape[2]), k, jnp.float32)
    scores = jnp.where(mask[:, None, None], reading.scores(products), UNSEEN)
    if reading.sinks is not None:
        sinks = reading.sinks.astype(jnp.float32).reshape(1, k.shape[2], -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]]
    return einsum("bkgts,bsku->btkgu", weights.astype(v.dtype), v).reshape(B, T, N, -1)


@dataclass(frozen=True)
class Causal:
    """The `attend` without a cache: all tokens of the row are given, each sees itself and those before it.
    Its state are the keys and values of the layers so far, by their numbers."""

    def __call__(
        self,
        state: Any,
        layer: int,
        q: Float[Array, "B T N _"],
        k: Keys | None,
        v: Values | None,
        reading: AttentionParams,
    ) -> tuple[Any, Float[Array, "B T N U"]]:
        at = jnp.arange(q.shape[1], dtype=jnp.int32)
        seen = reading.sees(at[None, :, None], at[None, None, :])
        if k is None:
            k, v = state[layer]
        assert k is not None
        state = {**(state or {}), layer: (k, v)}
        if reading.selection is not None:
            assert v is not None
            seen = reading.selection.chosen(v[:, :, 0], jnp.broadcast_to(seen, (len(q), *seen.shape[1:])))
        if reading.expand is not None:
            k, v = reading.expand(k, jnp.arange(len(k), dtype=jnp.int32))
        assert v is not None
        return state, attention(q, k, v, seen, reading)

    def recur(
        self, state: Any, layer: int, recurrence: Recurrence, new: RecurrentInputs
    ) -> tuple[Any, Float[Array, "B T N U"]]:
        B, T = new.shape
        count = jnp.full(B, T, jnp.int32)
        _, out = recurrence.scan(
            empty_state(recurrence.leaves, B), new, count, lambda pools, j, after: pools, None
        )
        return state, out


causal = Causal()

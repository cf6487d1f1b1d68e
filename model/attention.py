"""Grouped-query attention: parameters, the seam to caches (`Attend`), a reference over contiguous keys."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int, UInt32

from .config import GroupedQuery, NormKind
from .ffn import compute_gates
from .kinds import has_fusible_rope
from .layers import (
    add_alibi,
    add_bias,
    apply_softcap,
    clip_to_magnitude,
    einsum,
    einsums,
    normalise,
    prevent_fma,
    wrap_gain,
)
from .recurrent.states import Recurrence, RecurrentInputs, empty_recurrent_state
from .rope import RotaryFactors, alibi_slopes, apply_query_growth, rotate_heads
from .tree import Spec, pytree, static

MASK_VALUE = -1e30  # score of a key that a query does not see; finite, so that nothing becomes NaN
Keys = Float[Array, "B T K H"] | Float[Array, "B T 1 row"]  # of new tokens; a latent layer's are its rows
Values = Float[Array, "B T K H"] | Float[Array, "B T 1 size"]  # or the indexer's keys of a latent layer
LatentRows = Float[Array, "B S 1 row"]  # of a latent layer's cache
# Parameters: orders of keys, and their positions.
KeyPredicate = Callable[[UInt32[Array, "B T S"], UInt32[Array, "1 1 S"]], Bool[Array, "B T S"]]
CountKeys = Callable[[KeyPredicate], Int[Array, "B T"]]
ExpandedKeys = tuple[Float[Array, "B S K H"], Float[Array, "B S K U"]]  # expanded from latent rows
ExpandRows = Callable[[LatentRows, Int[Array, " B"]], ExpandedKeys]  # rows, and their numbers in the batch


@pytree
class Attention:
    """Projections of grouped-query attention. A field is None if the family does not have it."""

    q: Any  # [D,N,H]; if it is a `FusedQKV`, k and v are None
    k: Any  # [D,K,H], None if the layer borrows keys and values
    v: Any  # [D,K,H], None then too, and if keys serve as values
    o: Any  # [N,H,D]
    q_bias: Any = None  # [N,H]
    k_bias: Any = None  # [K,H]
    v_bias: Any = None  # [K,H]
    o_bias: Any = None  # [D]
    q_norm: Any = None  # [H], or [N,H] with a gain per head
    k_norm: Any = None  # [H], or [K,H]
    v_norm: Any = None  # no gain, but a kernel may stand here
    sinks: Any = None  # [N]
    gate: Any = None  # [D,N,H]
    gate_bias: Any = None  # [N,H]
    head_gate: Any = None  # [D,N]

    @property
    def has_keys(self) -> bool:
        """Return True if the layer has keys of its own, False if it reads an earlier layer's."""
        return self.k is not None or isinstance(self.q, FusedQKV)


@pytree
class FusedQKV:
    """Projections to queries, keys and values in one array.

    array: the three projections, side by side along the heads.
    heads: numbers of query, key and value heads.
    """

    array: Any  # [D,N+2K,H]
    heads: tuple[int, ...] = static(())

    @property
    def projections(self) -> tuple[Any, Any, Any]:
        """Return the three projections: copies, views of a NumPy array, or ShapeDtypeStructs."""
        q, k = np.cumsum(self.heads[:-1])
        if not isinstance(self.array, jax.ShapeDtypeStruct):
            return self.array[:, :q], self.array[:, q:k], self.array[:, k:]
        (D, _, H), sharding = self.array.shape, self.array.sharding
        q, k, v = (jax.ShapeDtypeStruct((D, n, H), self.array.dtype, sharding=sharding) for n in self.heads)
        return q, k, v

    def project(self, x: Float[Array, "B T D"]) -> list[Float[Array, "B T _ H"]]:
        """Project x to queries, keys and values.

        The three are split as columns of one matrix, so that XLA drops the split if `NewHeads` joins them
        again (fusion).
        """
        (B, T, _), H = x.shape, self.array.shape[2]
        rows = einsum("btd,dnh->btnh", x, self.array).reshape(B * T, -1)
        heads = jnp.split(rows, H * np.cumsum(self.heads[:-1]), axis=1)
        return [part.reshape(B, T, -1, H) for part in heads]


@dataclass(frozen=True)
class Selection:
    """The keys that each query sees: the `top_k` best of those before it (DeepSeek-V3.2, arXiv 2512.02556).

    A key's score is the sum over heads of `weights` times the positive part of its product with `q`. Of equal
    scores the first key wins.

    q: the indexer's queries.
    weights: weight of each head of the indexer.
    top_k: number of keys that a query sees.
    """

    q: Float[Array, "B T heads size"]
    weights: Float32[Array, "B T heads"]
    top_k: int

    def sortable_scores(self, k: Float[Array, "B S size"]) -> UInt32[Array, "B T S"]:
        """Return the scores as uint32 above 0 that sort like the floats: equal scores give equal numbers."""
        k = k[..., : self.q.shape[-1]]  # a pool may pad its rows with zeros
        products = jax.nn.relu(einsum("bthi,bsi->bths", self.q, k, jnp.float32))
        scores = prevent_fma(products * self.weights[..., None]).sum(2)
        bits = jax.lax.bitcast_convert_type(jnp.where(scores == 0, 0.0, scores), jnp.uint32)
        return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))

    def find_bounds(self, num_positions: int, count_keys: CountKeys) -> "TopKBounds":
        """Return the bounds of the selected keys among `num_positions` positions.

        `count_keys(holds)` counts, for each query, the keys for which a predicate of (order, position) holds.
        A hidden key has order 0.
        """

        def is_reached(x: UInt32[Array, "B T"]) -> Bool[Array, "B T"]:
            return count_keys(lambda order, position: order >= x[..., None]) >= self.top_k

        lowest = largest_satisfying(32, self.q.shape[:2], is_reached)
        num_ties = self.top_k - count_keys(lambda order, position: order > lowest[..., None])

        def is_early(x: UInt32[Array, "B T"]) -> Bool[Array, "B T"]:
            end = x[..., None]
            return (
                count_keys(lambda order, position: (order == lowest[..., None]) & (position < end)) < num_ties
            )

        return TopKBounds(lowest, largest_satisfying(num_positions.bit_length(), self.q.shape[:2], is_early))

    def select(self, k: Float[Array, "B S size"], mask: Bool[Array, "B T S"]) -> Bool[Array, "B T S"]:
        """Return the mask of the keys that queries see: the best keys that a first mask allows."""
        order, position = jnp.where(mask, self.sortable_scores(k), jnp.uint32(0)), key_positions(k.shape[1])
        bounds = self.find_bounds(k.shape[1], lambda holds: holds(order, position).sum(-1, dtype=jnp.int32))
        return mask & bounds.contains(order, position)


class TopKBounds(NamedTuple):
    """Bounds of the selected keys of each query.

    lowest_order: lowest order (see `Selection.sortable_scores`) of a selected key.
    last_position: last position at which a key of that order is still selected.
    """

    lowest_order: Any  # uint32 [B,T]
    last_position: Any  # uint32 [B,T]

    def contains(
        self, order: UInt32[Array, "B T S"], position: UInt32[Array, "1 1 S"]
    ) -> Bool[Array, "B T S"]:
        """Return the mask of the keys that lie within the bounds, from their orders and positions."""
        lowest, last = self.lowest_order[..., None], self.last_position[..., None]
        return (order > lowest) | ((order == lowest) & (position <= last))


def key_positions(S: int, first: Any = 0) -> UInt32[Array, "1 1 S"]:
    """Return S consecutive key positions, from a first one on."""
    return (first + jnp.arange(S, dtype=jnp.int32))[None, None].astype(jnp.uint32)


def largest_satisfying(
    bits: int, shape: tuple[int, ...], predicate: Callable[[UInt32[Array, "B T"]], Bool[Array, "B T"]]
) -> UInt32[Array, "B T"]:
    """Return the largest `bits`-bit numbers for which the predicate holds, by binary search.

    The predicate must hold for 0, and up to some number.
    """

    def set_bit(i: Int[Array, ""], number: UInt32[Array, "B T"]) -> UInt32[Array, "B T"]:
        candidate = number | (jnp.uint32(1 << (bits - 1)) >> i.astype(jnp.uint32))
        return jnp.where(predicate(candidate), candidate, number)

    return jax.lax.fori_loop(0, bits, set_bit, jnp.zeros(shape, jnp.uint32))


@dataclass(frozen=True)
class AttentionParams:
    """Parameters of a layer's attention.

    scale: factor of the products of queries and keys.
    window: number of keys that a query sees, itself included. None: all before it.
    softcap: bound of the scores, by tanh, or None.
    sinks: scores of seeing nothing, one per head, or None.
    expand: function that makes keys and values from cached rows of a latent layer and the rows' numbers in
        the batch. None: the cache holds keys and values.
    rank: keys are the cached rows, and values the first `rank` numbers of these. None: see `expand`.
    rope_queries: the rotated part of the queries; the queries themselves are then `rank` numbers long.
    selection: the only keys that queries see, or None.
    chunked: keys before the last multiple of the window are hidden too.
    num_kv_heads: number of key heads of a token. A cached row may hold several.
    alibi: fall of the scores with each position, one per head, or None. Kernels leave it to XLA.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Float[Array, " N"] | None = None
    expand: ExpandRows | None = None
    rank: int | None = None
    rope_queries: Float[Array, "B T N size"] | None = None
    selection: Selection | None = None
    chunked: bool = False
    num_kv_heads: int = 1
    alibi: tuple[float, ...] | None = None

    @property
    def has_expanded_keys(self) -> bool:
        """Return True if each head's keys and values are expanded from cached rows."""
        return self.expand is not None and self.rank is None

    def scores(self, products: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
        """Return the scores for the softmax, from products of queries and keys."""
        return apply_softcap(products * self.scale, self.softcap)

    def mask(self, query: Int[Array, "*#shape"], key: Int[Array, "*#shape"]) -> Bool[Array, "*#shape"]:
        """Return the mask of the key positions that the query positions see."""
        visible = key <= query
        return visible if self.window is None else visible & (key >= self.first_visible(query))

    def first_visible(self, query: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """Return the first position that query positions see. It may be below 0 in a window."""
        if self.window is None:
            return 0 * query
        return query - query % self.window if self.chunked else query - (self.window - 1)


@runtime_checkable
class Attend(Protocol):
    """Seam between the model and every cache: stores new keys and values, and attends to all visible ones.

    Takes the state, the layer's number, queries, new keys and values, and the layer's attention parameters.
    Returns the new state and the attention's output. A latent layer has no values; with a selection, `v`
    holds the indexer's keys. If `k` is None, the cache of this layer is read and not written.
    """

    def __call__(
        self,
        state: Any,
        layer: int,
        q: Float[Array, "B T N _"],
        k: Keys | None,
        v: Values | None,
        attention: AttentionParams,
        /,
    ) -> tuple[Any, Float[Array, "B T N U"]]: ...


@pytree
class NewHeads:
    """A layer's queries, keys and values of new tokens, before their norm and rotary embedding.

    q, k, v: outputs of the projections.
    rotary: rotation of each position, in two halves of a head.
    gains: gains of the norms of queries and of keys.
    norm: norm of queries and keys, or None.
    """

    q: Any  # [B,T,N,H]
    k: Any  # [B,T,K,H]
    v: Any  # [B,T,K,H]
    rotary: RotaryFactors
    gains: tuple[Any, Any] = (None, None)  # [H]
    norm: NormKind | None = static(None)

    @property
    def all_heads(self) -> Float[Array, "B T heads H"]:
        """Return all heads in one array. XLA fuses matrices of rows into one product without a copy."""
        (B, T, _, H), heads = self.q.shape, (self.q, self.k, self.v)
        rows = [x.reshape(-1, prod(x.shape[2:])) for x in heads]
        return jnp.concatenate(rows, axis=1).reshape(B, T, -1, H)

    @property
    def normed_qk(self) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
        """Return queries and keys after their norm."""
        if self.norm is None:
            return self.q, self.k
        q, k = map(wrap_gain, self.gains)
        return normalise(self.q, q, self.norm), normalise(self.k, k, self.norm)

    @property
    def rotated_qk(self) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"]]:
        """Return queries and keys after their norm and rotary embedding."""
        q, k = self.normed_qk
        return rotate_heads(q, self.rotary), rotate_heads(k, self.rotary)


@runtime_checkable
class FusedRopeAttend(Attend, Protocol):
    """An `Attend` that may fuse the norm, the rotary embedding and the write of new heads into one kernel."""

    def can_fuse_rope(
        self, state: Any, layer: int, q: Float[Array, "B T N H"], norm: NormKind | None, /
    ) -> bool:
        """Return True if a kernel fuses norm, rotary embedding and write of heads like these queries."""
        ...

    def attend_with_rope(
        self, state: Any, layer: int, new_heads: NewHeads, attention: AttentionParams, /
    ) -> tuple[Any, Float[Array, "B T N H"]]:
        """Norm, rotate and store new heads, and attend. Returns the new state and the attention's output."""
        ...


@runtime_checkable
class LatentAttend(Attend, Protocol):
    """An `Attend` that may read a latent layer's rows in place for many queries."""

    def can_read_latent_rows(self, state: Any, layer: int, q: Any, attention: AttentionParams, /) -> bool:
        """Return True if reading rows in place is cheaper than expanding each head's keys and values."""
        ...


def attention_spec(c: GroupedQuery, D: int, depth: int) -> Attention:
    """Return the specs of one layer's attention in a model of `depth` layers."""

    def optional_spec(is_present: bool, *sizes: int, axes: tuple[str, ...], scale=0.0) -> Spec | None:
        return Spec(sizes, axes, scale=scale) if is_present else None

    def gain_spec(heads: int, axis: str) -> Spec | None:
        if c.qk_norm is None or not c.qk_norm.gain:
            return None
        is_shared = c.qk_norm_over == "head"
        sizes, axes = ((H,), ("head",)) if is_shared else ((heads, H), (axis, "head"))
        return Spec(sizes, axes, mean=1.0 - c.qk_norm.offset, scale=0.0)

    N, K, H, gated = c.num_heads, c.num_kv_heads, c.head_size, c.gated and not c.gate_per_head
    keys, values = not c.kv_layers_back, not c.kv_layers_back and not c.keys_as_values
    kv_spec = Spec((D, K, H), ("model", "kv_heads", "head"))
    return Attention(
        q=Spec((D, N, H), ("model", "heads", "head")),
        k=kv_spec if keys else None,
        v=kv_spec if values else None,
        o=Spec((N, H, D), ("heads", "head", "model"), scale=0.02 / (2 * depth) ** 0.5),
        q_bias=optional_spec(c.bias, N, H, axes=("heads", "head")),
        k_bias=optional_spec(c.bias and keys, K, H, axes=("kv_heads", "head")),
        v_bias=optional_spec(c.bias and values, K, H, axes=("kv_heads", "head")),
        o_bias=optional_spec(c.output_bias, D, axes=("model",)),
        q_norm=gain_spec(N, "heads"),
        k_norm=gain_spec(K, "kv_heads") if keys else None,
        sinks=optional_spec(c.sinks, N, axes=("heads",)),
        gate=optional_spec(gated, D, N, H, axes=("model", "heads", "head"), scale=0.02),
        gate_bias=optional_spec(gated and c.bias, N, H, axes=("heads", "head")),
        head_gate=optional_spec(c.gated and c.gate_per_head, D, N, axes=("model", "heads"), scale=0.02),
    )


def run_attention(
    w: Attention,
    c: GroupedQuery,
    x: Float[Array, "B T D"],
    rotary: RotaryFactors | None,
    attend: Attend,
    state: Any,
    i: int,
) -> tuple[Any, Float[Array, "B T D"]]:
    """Attend with layer i over normed x. Returns attend's new state, and the output."""

    def apply_rope(x: Float[Array, "B T heads H"]) -> Float[Array, "B T heads H"]:
        return x if rotary is None or c.rope is None else rotate_heads(x, rotary, c.rope.interleaved)

    def norm_and_rotate(x: Float[Array, "B T heads H"], gain: Any) -> Float[Array, "B T heads H"]:
        if c.norm_after_rope:
            return norm_heads(apply_rope(x), gain, c)
        return apply_rope(norm_heads(x, gain, c))

    scale = c.head_size**-0.5 if c.scale is None else c.scale
    attention = AttentionParams(
        scale, c.window, c.softcap, w.sinks, chunked=c.chunked, num_kv_heads=c.num_kv_heads,
        alibi=None if c.alibi is None else alibi_slopes(c.num_heads, c.alibi),
    )  # fmt: skip
    q, k, v = (clip_to_magnitude(y, c.clip) for y in project_qkv(w, x))
    v = v if c.value_norm is None or v is None else normalise(v, wrap_gain(w.v_norm), c.value_norm)
    fused_attend = attend if has_fusible_rope(c) and isinstance(attend, FusedRopeAttend) else None
    if (
        fused_attend
        and k is not None
        and v is not None
        and fused_attend.can_fuse_rope(state, i, q, c.qk_norm)
    ):
        assert rotary is not None
        heads = NewHeads(q, k, v, rotary, (w.q_norm, w.k_norm), c.qk_norm)
        state, out = fused_attend.attend_with_rope(state, i, heads, attention)
    else:
        q = apply_query_growth(norm_and_rotate(q, w.q_norm), rotary)
        k = None if k is None else norm_and_rotate(k, w.k_norm)
        state, out = attend(state, i - c.kv_layers_back, q, k, v, attention)
    if c.gated:
        out = out * compute_gates(w.gate, w.gate_bias, w.head_gate, x, c.gate_activation)
    return state, add_bias(einsum("btnh,nhd->btd", out, w.o), w.o_bias)


def project_qkv(
    w: Attention, x: Float[Array, "B T D"]
) -> tuple[Float[Array, "B T N H"], Keys | None, Values | None]:
    """Project x to queries, keys and values, biases included. Keys and values are None if the layer borrows
    them."""
    if isinstance(w.q, FusedQKV):
        q, k, v = w.q.project(x)
    else:
        q, k, v = einsums("btd,dnh->btnh", x, (w.q, w.k, w.v))
    k = k if k is None else add_bias(k, w.k_bias)
    return add_bias(q, w.q_bias), k, k if v is None else add_bias(v, w.v_bias)


def norm_heads(x: Float[Array, "B T heads H"], gain: Any, c: GroupedQuery) -> Float[Array, "B T heads H"]:
    """Norm queries or keys as the layer says, over each head or over all heads."""
    if c.qk_norm is None:
        return x
    return normalise(x, wrap_gain(gain), c.qk_norm, (-2, -1) if c.qk_norm_over == "all heads" else -1)


def group_queries(q: Float[Array, "B T N H"], kv_heads: int) -> Float[Array, "B T K G H"]:
    """Return query heads grouped by the key head that they share."""
    B, T, N, H = q.shape
    return q.reshape(B, T, kv_heads, N // kv_heads, H)


def dot_product_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K U"],
    mask: Bool[Array, "#B T S"],
    attention: AttentionParams,
) -> Float[Array, "B T N U"]:
    """Compute softmax attention, with scores in float32. Every query must see at least one key."""
    B, T, N, _ = q.shape
    products = einsum("btkgh,bskh->bkgts", group_queries(q, k.shape[2]), k, jnp.float32)
    heads, query, key = (1, k.shape[2], -1, 1, 1), np.arange(T)[:, None], np.arange(k.shape[1])[None]
    scores = add_alibi(attention.scores(products), attention.alibi, heads, query, key)
    scores = jnp.where(mask[:, None, None], scores, MASK_VALUE)
    if attention.sinks is not None:
        sinks = attention.sinks.astype(jnp.float32).reshape(1, k.shape[2], -1, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))], axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : k.shape[1]]
    return einsum("bkgts,bsku->btkgu", weights.astype(v.dtype), v).reshape(B, T, N, -1)


@dataclass(frozen=True)
class Causal:
    """The `Attend` without a cache: each token sees itself and those before it in its row.

    Its state holds the keys and values of the layers so far, by layer number.
    """

    def __call__(
        self,
        state: Any,
        layer: int,
        q: Float[Array, "B T N _"],
        k: Keys | None,
        v: Values | None,
        attention: AttentionParams,
    ) -> tuple[Any, Float[Array, "B T N U"]]:
        positions = jnp.arange(q.shape[1], dtype=jnp.int32)
        mask = attention.mask(positions[None, :, None], positions[None, None, :])
        if k is None:
            k, v = state[layer]
        assert k is not None
        state = {**(state or {}), layer: (k, v)}
        if attention.selection is not None:
            assert v is not None
            mask = attention.selection.select(v[:, :, 0], jnp.broadcast_to(mask, (len(q), *mask.shape[1:])))
        if attention.expand is not None:
            k, v = attention.expand(k, jnp.arange(len(k), dtype=jnp.int32))
        assert v is not None
        return state, dot_product_attention(q, k, v, mask, attention)

    def run_recurrence(
        self, state: Any, layer: int, recurrence: Recurrence, inputs: RecurrentInputs
    ) -> tuple[Any, Float[Array, "B T N U"]]:
        """Run a recurrence over all tokens from an empty state. Returns the state unchanged, and the
        outputs."""
        B, T = inputs.shape
        count = jnp.full(B, T, jnp.int32)
        _, out = recurrence.scan(
            empty_recurrent_state(recurrence.state_shapes, B),
            inputs,
            count,
            lambda pools, j, after: pools,
            None,
        )
        return state, out


causal = Causal()

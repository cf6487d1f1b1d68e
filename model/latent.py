"""Multi-head latent attention: keys and values of all heads are expanded from one cached row.

Few queries read the rows in place: the projections of keys and values move to the side of queries and outputs
("absorbed"). Many queries read expanded keys and values (DeepSeek-V2, arXiv 2405.04434, section 2.1), unless
a kernel reads the rows for them too.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .attention import Attend, AttentionParams, ExpandedKeys, ExpandRows, LatentAttend, LatentRows, Selection
from .config import Latent, LayerKind, NormKind
from .kinds import Indexer
from .layers import PerRowWeight, add_bias, einsum, norm_spec, normalise, rms_norm
from .rope import RotaryFactors, rotate_heads
from .tree import Spec, pytree

# Queries from which keys and values are expanded. It pays from some 100 on. All chunks of a prompt are on one
# side, so that their bits agree.
MIN_EXPANDED_QUERIES = 32
INDEX_NORM = NormKind("layer", 1e-6, bias=True)  # of an indexer's keys


@pytree
class IndexerWeights:
    """Projections of the indexer, which selects keys."""

    q_up: Any  # [query_rank,heads,size]
    k_down: Any  # [D,size]
    k_norm: Any  # Norm of [size]
    weigh: Any  # [D,heads]


@pytree
class LatentAttention:
    """Projections of latent attention. H is nope_size + rope_size; a cached row has R + rope_size numbers.

    Queries are projected from x, or from a latent of rank `query_rank`.
    """

    q: Any  # [D,N,H], None if there is a query rank
    q_down: Any  # [D,query_rank]
    q_norm: Any  # [query_rank]
    q_up: Any  # [query_rank,N,H]
    kv_down: Any  # [D,row]
    kv_norm: Any  # [R]
    k_up: Any  # [R,N,H - rope_size]
    v_up: Any  # [R,N,U]
    o: Any  # [N,U,D]
    q_down_bias: Any = None  # [query_rank]
    kv_down_bias: Any = None  # [row]
    o_bias: Any = None  # [D]
    indexer: IndexerWeights | None = None


def latent_spec(c: Latent, D: int, depth: int) -> LatentAttention:
    """Return the specs of one layer's latent attention in a model of `depth` layers."""
    N, R, U, row = c.num_heads, c.rank, c.value_size, c.rank + c.rope_size
    H, query_rank = c.nope_size + c.rope_size, c.query_rank
    plain = query_rank is None
    return LatentAttention(
        q=Spec((D, N, H), ("model", "heads", "head")) if plain else None,
        q_down=None if plain else Spec((D, query_rank), ("model", "query_rank")),
        q_norm=None if plain else Spec((query_rank,), ("query_rank",), mean=1.0, scale=0.0),
        q_up=None if plain else Spec((query_rank, N, H), ("query_rank", "heads", "head")),
        kv_down=Spec((D, row), ("model", "rank")),
        kv_norm=Spec((R,), ("rank",), mean=1.0, scale=0.0),
        k_up=Spec((R, N, c.nope_size), ("rank", "heads", "head")),
        v_up=Spec((R, N, U), ("rank", "heads", "head")),
        o=Spec((N, U, D), ("heads", "head", "model"), scale=0.02 / (2 * depth) ** 0.5),
        q_down_bias=None if plain or not c.bias else Spec((query_rank,), ("query_rank",), scale=0.0),
        kv_down_bias=Spec((row,), ("rank",), scale=0.0) if c.bias else None,
        o_bias=Spec((D,), ("model",), scale=0.0) if c.bias else None,
        indexer=None if c.indexer is None else indexer_spec(c, c.indexer, D),
    )


def indexer_spec(c: Latent, indexer: Indexer, D: int) -> IndexerWeights:
    """Return the specs of an indexer.

    Raises ValueError if the layer has no query rank, or if an indexer's head has fewer dimensions than are
    rotated.
    """
    if c.query_rank is None or indexer.head_size < c.rope_size:
        raise ValueError(f"an indexer needs a query_rank, and heads of rope_size {c.rope_size} or more")
    return IndexerWeights(
        q_up=Spec(
            (c.query_rank, indexer.num_heads, indexer.head_size), ("query_rank", "index_heads", "index_head")
        ),
        k_down=Spec((D, indexer.head_size), ("model", "index_head")),
        k_norm=norm_spec(INDEX_NORM, indexer.head_size),
        weigh=Spec((D, indexer.num_heads), ("model", "index_heads")),
    )


def active_indexer(kind: LayerKind) -> Indexer | None:
    """Return the indexer that selects a layer's keys, or None if its queries see all keys."""
    indexer = kind.mixer.indexer if isinstance(kind.mixer, Latent) else None
    return indexer if indexer and indexer.top_k else None


def project_query_latent(
    w: LatentAttention, c: Latent, x: Float[Array, "B T D"]
) -> Float[Array, "B T query_rank"]:
    """Project x to the latent that queries are made from."""
    return rms_norm(add_bias(einsum("btd,dq->btq", x, w.q_down), w.q_down_bias), w.q_norm, c.norm)


def project_queries(w: LatentAttention, c: Latent, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
    """Project x to queries, through their latent if there is one."""
    if w.q is not None:
        return einsum("btd,dnh->btnh", x, w.q)
    return einsum("btq,qnh->btnh", project_query_latent(w, c, x), w.q_up)


def run_indexer(
    w: LatentAttention, c: Latent, x: Float[Array, "B T D"], rotary: RotaryFactors | None
) -> tuple[Float[Array, "B T 1 size"] | None, Selection | None]:
    """Return a token's indexer key for the cache and its query's selection; None for both if all keys are
    seen."""
    indexer_weights, indexer = w.indexer, c.indexer
    if indexer_weights is None or indexer is None or indexer.top_k is None:
        return None, None
    assert rotary is not None, "an indexer turns its keys"
    q = einsum("btq,qni->btni", project_query_latent(w, c, x), indexer_weights.q_up)
    key = normalise(einsum("btd,di->bti", x, indexer_weights.k_down), indexer_weights.k_norm, INDEX_NORM)[
        :, :, None
    ]
    weights = einsum("btd,dn->btn", x, indexer_weights.weigh, jnp.float32)
    weights = weights * (indexer.num_heads * indexer.head_size) ** -0.5
    q, key = (rotate_heads(x, rotary, indexer.interleaved) for x in (q, key))
    return key, Selection(q, weights, indexer.top_k)


def apply_latent_rope(
    c: Latent, x: Float[Array, "B T heads size"], rotary: RotaryFactors | None
) -> Float[Array, "B T heads size"]:
    """Rotate the position-dependent part of queries or keys, if the layer has a rope."""
    return x if rotary is None or c.rope is None else rotate_heads(x, rotary, c.rope.interleaved)


def compute_latent_row(
    w: LatentAttention, c: Latent, x: Float[Array, "B T D"], rotary: RotaryFactors | None
) -> Float[Array, "B T 1 row"]:
    """Return a token's row for the cache: its latent, and the rotated key that all heads share."""
    down = add_bias(einsum("btd,dz->btz", x, w.kv_down), w.kv_down_bias)[:, :, None]
    latent = rms_norm(down[..., : c.rank], w.kv_norm, c.norm)
    return jnp.concatenate([latent, apply_latent_rope(c, down[..., c.rank :], rotary)], axis=-1)


def run_latent_attention(
    w: LatentAttention,
    c: Latent,
    x: Float[Array, "B T D"],
    rotary: RotaryFactors | None,
    attend: Attend,
    state: Any,
    i: int,
) -> tuple[Any, Float[Array, "B T D"]]:
    """Attend with latent layer i over normed x. Returns attend's new state, and the output."""
    q, row = project_queries(w, c, x), compute_latent_row(w, c, x, rotary)
    key, selection = run_indexer(w, c, x, rotary)
    nope, rope_queries = q[..., : c.nope_size], apply_latent_rope(c, q[..., c.nope_size :], rotary)
    scale = (c.nope_size + c.rope_size) ** -0.5 if c.scale is None else c.scale
    row_params = {"expand": lambda rows, _: (rows, rows[..., : c.rank]), "rank": c.rank}
    attention = AttentionParams(scale, **row_params, selection=selection)
    absorbed = jax.ShapeDtypeStruct((*nope.shape[:3], c.rank + c.rope_size), x.dtype)
    has_row_kernel = isinstance(attend, LatentAttend) and attend.can_read_latent_rows(
        state, i, absorbed, attention
    )
    # reading in place costs more than expanding if the latent is wider than half of a head's key and value
    if x.shape[1] >= MIN_EXPANDED_QUERIES and c.nope_size + c.value_size < 2 * c.rank and not has_row_kernel:
        q, expand = jnp.concatenate([nope, rope_queries], axis=-1), make_expand_rows(w, c)
        state, out = attend(state, i, q, row, key, AttentionParams(scale, expand=expand, selection=selection))
    else:
        q = einsum("btnh,rnh->btnr", nope, w.k_up)
        if has_row_kernel:
            attention = replace(attention, rope_queries=rope_queries)
        else:
            q = jnp.concatenate([q, rope_queries], axis=-1)
        state, out = attend(state, i, q, row, key, attention)
        out = einsum("btnr,rnu->btnu", out, w.v_up)
    return state, add_bias(einsum("btnu,nud->btd", out, w.o), w.o_bias)


def make_expand_rows(w: LatentAttention, c: Latent) -> ExpandRows:
    """Return a function that expands cached rows to the keys and values of all heads."""

    def expand_rows(rows: LatentRows, batch_rows: Int[Array, " rows"]) -> ExpandedKeys:
        # a pool may pad its rows with zeros
        latent, shared = rows[:, :, 0, : c.rank], rows[..., c.rank : c.rank + c.rope_size]
        k_up, v_up = (
            x.select_rows(batch_rows) if isinstance(x, PerRowWeight) else x for x in (w.k_up, w.v_up)
        )
        k = einsum("bsr,rnh->bsnh", latent, k_up)
        shared = jnp.broadcast_to(shared, (*k.shape[:-1], c.rope_size))
        return jnp.concatenate([k, shared], axis=-1), einsum("bsr,rnu->bsnu", latent, v_up)

    return expand_rows

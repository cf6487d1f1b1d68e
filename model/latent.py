"""Multi-head latent attention: keys and values of all heads are made from one cached row.

Few queries read the rows as they are, with the keys' and values' projections moved to the queries' and
outputs' side ("absorbed"); many queries read keys and values that are made from the rows (DeepSeek-V2, arXiv
2405.04434, section 2.1), unless a kernel reads the rows for them too.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .attention import Attend, AttentionParams, Expand, LatentAttend, LatentRows, Made, Selection
from .config import Latent, LayerKind, NormKind
from .kinds import Indexer
from .layers import RowWeight, biased, einsum, norm_spec, normalise, rms_norm
from .rope import Rotation, rotate
from .tree import Spec, pytree

# Making keys and values pays from some 100 queries on. Chunks of a prompt are all on one side, so that their
# bits agree.
MANY = 32
INDEX_NORM = NormKind("layer", 1e-6, bias=True)  # of an indexer's keys


@pytree
class IndexerWeights:
    """Projections of what chooses keys."""

    q_up: Any  # [query_rank,heads,size]
    k_down: Any  # [D,size]
    k_norm: Any  # Norm of [size]
    weigh: Any  # [D,heads]


@pytree
class LatentAttention:
    """Projections; H is nope_size + rope_size, a row of the cache R + rope_size numbers.

    Queries come straight from x, or through a latent of their own rank.
    """

    q: Any  # [D,N,H], None where there is a query rank
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
    """The parameters of one layer of `depth`."""
    N, R, U, row = c.num_heads, c.rank, c.value_size, c.rank + c.rope_size
    H, own = c.nope_size + c.rope_size, c.query_rank
    plain = own is None
    return LatentAttention(
        q=Spec((D, N, H), ("model", "heads", "head")) if plain else None,
        q_down=None if plain else Spec((D, own), ("model", "query_rank")),
        q_norm=None if plain else Spec((own,), ("query_rank",), mean=1.0, scale=0.0),
        q_up=None if plain else Spec((own, N, H), ("query_rank", "heads", "head")),
        kv_down=Spec((D, row), ("model", "rank")),
        kv_norm=Spec((R,), ("rank",), mean=1.0, scale=0.0),
        k_up=Spec((R, N, c.nope_size), ("rank", "heads", "head")),
        v_up=Spec((R, N, U), ("rank", "heads", "head")),
        o=Spec((N, U, D), ("heads", "head", "model"), scale=0.02 / (2 * depth) ** 0.5),
        q_down_bias=None if plain or not c.bias else Spec((own,), ("query_rank",), scale=0.0),
        kv_down_bias=Spec((row,), ("rank",), scale=0.0) if c.bias else None,
        o_bias=Spec((D,), ("model",), scale=0.0) if c.bias else None,
        indexer=None if c.indexer is None else indexer_spec(c, c.indexer, D),
    )


def indexer_spec(c: Latent, own: Indexer, D: int) -> IndexerWeights:
    """Raises ValueError where it has nothing to make queries of, or less in a head than is turned."""
    if c.query_rank is None or own.head_size < c.rope_size:
        raise ValueError(f"an indexer needs a query_rank, and heads of rope_size {c.rope_size} or more")
    return IndexerWeights(
        q_up=Spec((c.query_rank, own.num_heads, own.head_size), ("query_rank", "index_heads", "index_head")),
        k_down=Spec((D, own.head_size), ("model", "index_head")),
        k_norm=norm_spec(INDEX_NORM, own.head_size),
        weigh=Spec((D, own.num_heads), ("model", "index_heads")),
    )


def chooser_of(kind: LayerKind) -> Indexer | None:
    """The indexer that selects a layer's keys, or None if its queries see all."""
    indexer = kind.mixer.indexer if isinstance(kind.mixer, Latent) else None
    return indexer if indexer and indexer.keys else None


def query_latent(w: LatentAttention, c: Latent, x: Float[Array, "B T D"]) -> Float[Array, "B T query_rank"]:
    return rms_norm(biased(einsum("btd,dq->btq", x, w.q_down), w.q_down_bias), w.q_norm, c.norm)


def queries(w: LatentAttention, c: Latent, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
    if w.q is not None:
        return einsum("btd,dnh->btnh", x, w.q)
    return einsum("btq,qnh->btnh", query_latent(w, c, x), w.q_up)


def choice(
    w: LatentAttention, c: Latent, x: Float[Array, "B T D"], rotary: Rotation | None
) -> tuple[Float[Array, "B T 1 size"] | None, Selection | None]:
    """A token's indexer key for the cache, and its query's selection; None both where all keys are seen."""
    own, indexer = w.indexer, c.indexer
    if own is None or indexer is None or indexer.keys is None:
        return None, None
    assert rotary is not None, "an indexer turns its keys"
    q = einsum("btq,qni->btni", query_latent(w, c, x), own.q_up)
    key = normalise(einsum("btd,di->bti", x, own.k_down), own.k_norm, INDEX_NORM)[:, :, None]
    weights = einsum("btd,dn->btn", x, own.weigh, jnp.float32)
    weights = weights * (indexer.num_heads * indexer.head_size) ** -0.5
    return rotate(key, rotary), Selection(rotate(q, rotary), weights, indexer.keys)


def turned(
    c: Latent, x: Float[Array, "B T heads size"], rotary: Rotation | None
) -> Float[Array, "B T heads size"]:
    return x if rotary is None or c.rope is None else rotate(x, rotary, c.rope.interleaved)


def cached_row(
    w: LatentAttention, c: Latent, x: Float[Array, "B T D"], rotary: Rotation | None
) -> Float[Array, "B T 1 row"]:
    """A token's row for the cache: its latent, and the rotated key that all heads share."""
    down = biased(einsum("btd,dz->btz", x, w.kv_down), w.kv_down_bias)[:, :, None]
    latent = rms_norm(down[..., : c.rank], w.kv_norm, c.norm)
    return jnp.concatenate([latent, turned(c, down[..., c.rank :], rotary)], axis=-1)


def mix_latent(
    w: LatentAttention,
    c: Latent,
    x: Float[Array, "B T D"],
    rotary: Rotation | None,
    attend: Attend,
    state: Any,
    i: int,
) -> tuple[Any, Float[Array, "B T D"]]:
    """Attention of layer i over normed x, and attend's new state."""
    q, row = queries(w, c, x), cached_row(w, c, x, rotary)
    key, selection = choice(w, c, x, rotary)
    nope, rest = q[..., : c.nope_size], turned(c, q[..., c.nope_size :], rotary)
    scale = (c.nope_size + c.rope_size) ** -0.5 if c.scale is None else c.scale
    parts = {"expand": lambda rows, _: (rows, rows[..., : c.rank]), "rank": c.rank}
    reading = AttentionParams(scale, **parts, selection=selection)
    absorbed = jax.ShapeDtypeStruct((*nope.shape[:3], c.rank + c.rope_size), x.dtype)
    by_kernel = isinstance(attend, LatentAttend) and attend.reads_rows(state, i, absorbed, reading)
    # a latent wider than half of a head's key and value makes reading it dearer than making them
    if x.shape[1] >= MANY and c.nope_size + c.value_size < 2 * c.rank and not by_kernel:
        q, expand = jnp.concatenate([nope, rest], axis=-1), expanded(w, c)
        state, out = attend(state, i, q, row, key, AttentionParams(scale, expand=expand, selection=selection))
    else:
        q = einsum("btnh,rnh->btnr", nope, w.k_up)
        if by_kernel:
            reading = replace(reading, turned=rest)
        else:
            q = jnp.concatenate([q, rest], axis=-1)
        state, out = attend(state, i, q, row, key, reading)
        out = einsum("btnr,rnu->btnu", out, w.v_up)
    return state, biased(einsum("btnu,nud->btd", out, w.o), w.o_bias)


def expanded(w: LatentAttention, c: Latent) -> Expand:
    """Function that makes every head's keys and values from cached rows."""

    def expand(rows: LatentRows, of: Int[Array, " rows"]) -> Made:
        # a pool may have zeros behind its rows
        latent, shared = rows[:, :, 0, : c.rank], rows[..., c.rank : c.rank + c.rope_size]
        k_up, v_up = (x.of_rows(of) if isinstance(x, RowWeight) else x for x in (w.k_up, w.v_up))
        k = einsum("bsr,rnh->bsnh", latent, k_up)
        shared = jnp.broadcast_to(shared, (*k.shape[:-1], c.rope_size))
        return jnp.concatenate([k, shared], axis=-1), einsum("bsr,rnu->bsnu", latent, v_up)

    return expand

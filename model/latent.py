"""Multi-head latent attention: keys and values of all heads are made from one cached row.

Few queries read the rows as they are, with the keys' and values' projections moved to the queries' and
outputs' side ("absorbed"); many queries read keys and values that are made from the rows (DeepSeek-V2, arXiv
2405.04434, section 2.1).
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .attention import Attend, LatentRows, Made, Reading
from .config import Latent
from .layers import biased, einsum, rms_norm
from .rope import Turn, rotate
from .tree import Spec, pytree

# Making keys and values pays from some 100 queries on. Chunks of a prompt are all on one side, so that their
# bits agree.
MANY = 32


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
    )


def queries(w: LatentAttention, c: Latent, x: Float[Array, "B T D"]) -> Float[Array, "B T N H"]:
    if w.q is not None:
        return einsum("btd,dnh->btnh", x, w.q)
    latent = rms_norm(biased(einsum("btd,dq->btq", x, w.q_down), w.q_down_bias), w.q_norm, c.norm)
    return einsum("btq,qnh->btnh", latent, w.q_up)


def turned(c: Latent, x: Float[Array, "B T heads size"], turn: Turn | None) -> Float[Array, "B T heads size"]:
    return x if turn is None or c.rope is None else rotate(x, turn, c.rope.interleaved)


def cached_row(
    w: LatentAttention, c: Latent, x: Float[Array, "B T D"], turn: Turn | None
) -> Float[Array, "B T 1 row"]:
    """What a token leaves in the cache: its latent, and the turned key that all heads share."""
    down = biased(einsum("btd,dz->btz", x, w.kv_down), w.kv_down_bias)[:, :, None]
    latent = rms_norm(down[..., : c.rank], w.kv_norm, c.norm)
    return jnp.concatenate([latent, turned(c, down[..., c.rank :], turn)], axis=-1)


def mix_latent(
    w: LatentAttention,
    c: Latent,
    x: Float[Array, "B T D"],
    turn: Turn | None,
    attend: Attend,
    state: Any,
    i: int,
) -> tuple[Any, Float[Array, "B T D"]]:
    """Attention of layer i over normed x, and attend's new state."""
    q, row = queries(w, c, x), cached_row(w, c, x, turn)
    nope, rest = q[..., : c.nope_size], turned(c, q[..., c.nope_size :], turn)
    scale = (c.nope_size + c.rope_size) ** -0.5 if c.scale is None else c.scale
    # a latent wider than half of a head's key and value makes reading it dearer than making them
    if x.shape[1] >= MANY and c.nope_size + c.value_size < 2 * c.rank:
        q, expand = jnp.concatenate([nope, rest], axis=-1), expanded(w, c)
        state, out = attend(state, i, q, row, None, Reading(scale, expand=expand))
    else:
        q = jnp.concatenate([einsum("btnh,rnh->btnr", nope, w.k_up), rest], axis=-1)
        read = Reading(scale, expand=lambda rows: (rows, rows[..., : c.rank]), rank=c.rank)
        state, out = attend(state, i, q, row, None, read)
        out = einsum("btnr,rnu->btnu", out, w.v_up)
    return state, biased(einsum("btnu,nud->btd", out, w.o), w.o_bias)


def expanded(w: LatentAttention, c: Latent) -> Callable[[LatentRows], Made]:
    """How every head's keys and values are made of cached rows."""

    def expand(rows: LatentRows) -> Made:
        latent, shared = rows[:, :, 0, : c.rank], rows[..., c.rank :]
        k = einsum("bsr,rnh->bsnh", latent, w.k_up)
        shared = jnp.broadcast_to(shared, (*k.shape[:-1], c.rope_size))
        return jnp.concatenate([k, shared], axis=-1), einsum("bsr,rnu->bsnu", latent, w.v_up)

    return expand

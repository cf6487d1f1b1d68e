"""Norms and rotary embedding of a layer's new queries and keys, and the writes of keys and values into their
pages, in one kernel on NVIDIA GPUs (Pallas, Triton backend).

XLA makes four kernels of it: a scatter writes one array, and no fusion crosses it.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from ...model.attention import NewHeads
from ...model.config import NormKind
from ...model.gpus import Kernel, may_use
from ...model.layers import scaled_by
from ...model.sharding import on_several_devices
from ..quantised import QuantisedPool
from .attention import DTYPES, HEAD_SIZES, MOST_GROUPED
from .tiles import Piece, load, store

TURN = Kernel(
    "turn_and_write", "triton", "XLA turns queries and keys, and writes keys and values, one by one"
)


class Tokens(NamedTuple):
    """Heads [rows,N+2K,H] of tokens, cosine and sine [rows,pairs], and their places: pages, of which those
    past the pool drop the token, and places in these [rows]. gains: of the norms of queries and keys [H],
    or None."""

    heads: Any
    cos: Any
    sin: Any
    page: Any
    offset: Any
    gains: tuple[Any, Any]


def has_turn(q: Float[Array, "B T N H"], pools: tuple[Any, Any], norm: NormKind | None) -> bool:
    """True if the kernel takes heads like these queries, and writes to these pools, on a single device."""
    return takes(q, pools, norm) and not on_several_devices((q, pools)) and may_use(TURN)


def takes(q: Any, pools: tuple[Any, Any], norm: NormKind | None) -> bool:
    (*_, N, H), K = q.shape, pools[0].shape[0]
    plain = not any(isinstance(pool, QuantisedPool) for pool in pools)
    alike = plain and all(pool.dtype == q.dtype for pool in pools) and q.dtype.name in DTYPES
    normed = norm is None or (H == pl.next_power_of_2(H) and norm.kind == "rms")
    fits = H in HEAD_SIZES and N // K <= MOST_GROUPED
    return alike and normed and fits


@partial(jax.jit, static_argnames="interpret")  # layers share one trace
def turn_and_write(
    new: NewHeads,
    pools: tuple[Any, Any],
    place: tuple[Int[Array, "B T"], Int[Array, "B T"]],
    interpret: bool = False,
) -> tuple[Float[Array, "B T N H"], tuple[Any, Any]]:
    """Queries as attention takes them, and the pools with keys and values."""
    (B, T, N, H), heads = new.q.shape, new.side_by_side
    K, rows = pools[0].shape[0], B * T
    cos, sin = (x.reshape(rows, -1) for x in new.rotary[:2])
    page, offset = (x.reshape(rows) for x in place)
    given = Tokens(heads.reshape(rows, -1, H), cos, sin, page, offset, new.gains)
    first = len(jax.tree.leaves(given))
    shapes = [jax.ShapeDtypeStruct((rows, N, H), heads.dtype)]
    moved = 2 * heads.nbytes + 4 * rows * (2 * given.cos.shape[1] + 2)
    with jax.named_scope(f"bytes_accessed:{moved}"):  # the planner reads it
        q, keys, values = pl.pallas_call(
            partial(turn_kernel, norm=new.norm),
            grid=(rows, K),
            out_shape=shapes + [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
            input_output_aliases={first: 1, first + 1: 2},
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
            name="turn_and_write",
        )(given, *pools)
    return q.reshape(B, T, N, H), (keys, values)


def turn_kernel(new: Tokens, _: Any, __: Any, q: Any, keys: Any, values: Any, *, norm: NormKind | None):
    """A token's queries of a key head, its key, and its value."""
    row, head = pl.program_id(0), pl.program_id(1)
    N, K, P = q.shape[1], *keys.shape[:2]
    page, offset, one = new.page[row], new.offset[row], jnp.zeros(1, jnp.int32)
    member = jnp.arange(pl.next_power_of_2(N // K), dtype=jnp.int32)
    here = member < N // K
    own = jnp.where(here, head * (N // K) + member, N)  # interpreted stores touch what is masked
    for piece, x in turned(new, row, own, 0, norm):
        store(q, row, own, value=x, mask=here, piece=piece)

    @pl.when(page < P)
    def _() -> None:
        for piece, x in turned(new, row, N + head + one, 1, norm):
            store(keys, head, page, offset, value=x, mask=one == 0, piece=piece)
        x = load(new.heads, row, N + K + head + one, piece=(0, keys.shape[3]))
        store(values, head, page, offset, value=x, mask=one == 0)


def turned(
    new: Tokens, row: Any, heads: Int[Array, " heads"], which: int, norm: NormKind | None
) -> list[tuple[Piece, Float[Array, "heads _"]]]:
    """The pieces of heads: both halves of what is turned, and the rest."""
    H, pairs = new.heads.shape[-1], new.cos.shape[-1]
    scale = None
    if norm is not None:
        whole = load(new.heads, row, heads, piece=(0, H)).astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(whole * whole, axis=-1, keepdims=True) + norm.eps)

    def part(piece: Piece) -> Float[Array, "heads _"]:
        x = load(new.heads, row, heads, piece=piece)
        if norm is None or scale is None:
            return x
        gain = None if new.gains[which] is None else load(new.gains[which], piece=piece)
        return scaled_by(x.astype(jnp.float32) * scale, gain, norm, x.dtype)

    cos, sin = (load(x, row, piece=(0, pairs))[None] for x in (new.cos, new.sin))
    left, right = (part((first, pairs)).astype(jnp.float32) for first in (0, pairs))
    pieces = [((0, pairs), left * cos - right * sin), ((pairs, pairs), right * cos + left * sin)]
    rest = (2 * pairs, H - 2 * pairs)
    return pieces if not rest[1] else [*pieces, (rest, part(rest))]

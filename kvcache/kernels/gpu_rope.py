"""Norms and RoPE of a layer's new heads, and the writes of keys and values to their pages, in one kernel. It
runs on NVIDIA GPUs (Pallas, Triton backend).

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
from ...model.gpus import Kernel, may_use_kernel
from ...model.layers import apply_gain
from ...model.sharding import is_multi_device
from ..quantised import QuantisedPool
from .attention import HEAD_SIZES, KERNEL_DTYPES, MAX_GROUPED_HEADS
from .tiles import Piece, load_piece, store_piece

ROPE_KERNEL = Kernel(
    "turn_and_write", "triton", "XLA turns queries and keys, and writes keys and values, one by one"
)


class Tokens(NamedTuple):
    """New tokens, as the kernel reads them.

    heads: queries, keys and values [rows,N+2K,H]
    cos, sin: of the rotation [rows,pairs]
    page: pages of the tokens [rows]; one past the pool drops its token
    offset: offsets of the tokens in their pages [rows]
    gains: of the norms of queries and keys [H], or None
    """

    heads: Any
    cos: Any
    sin: Any
    page: Any
    offset: Any
    gains: tuple[Any, Any]


def has_gpu_rope(q: Float[Array, "B T N H"], pools: tuple[Any, Any], norm: NormKind | None) -> bool:
    """True if the kernel takes heads like these queries, and writes to these pools, on a single device."""
    return fits_gpu_rope(q, pools, norm) and not is_multi_device((q, pools)) and may_use_kernel(ROPE_KERNEL)


def fits_gpu_rope(q: Any, pools: tuple[Any, Any], norm: NormKind | None) -> bool:
    """True if the kernel has code for these queries, pools and norm."""
    (*_, N, H), K = q.shape, pools[0].shape[0]
    plain = not any(isinstance(pool, QuantisedPool) for pool in pools)
    alike = plain and all(pool.dtype == q.dtype for pool in pools) and q.dtype.name in KERNEL_DTYPES
    normed = norm is None or (H == pl.next_power_of_2(H) and norm.kind == "rms")
    fits = H in HEAD_SIZES and N // K <= MAX_GROUPED_HEADS
    return alike and normed and fits


@partial(jax.jit, static_argnames="interpret")  # layers share one trace
def gpu_rope_and_write(
    new_heads: NewHeads,
    pools: tuple[Any, Any],
    slot_mapping: tuple[Int[Array, "B T"], Int[Array, "B T"]],
    interpret: bool = False,
) -> tuple[Float[Array, "B T N H"], tuple[Any, Any]]:
    """Norm and rotate new heads, and write keys and values to their pages in place (aliased outputs). Returns
    the queries and the pools."""
    (B, T, N, H), heads = new_heads.q.shape, new_heads.all_heads
    K, rows = pools[0].shape[0], B * T
    cos, sin = (x.reshape(rows, -1) for x in new_heads.rotary[:2])
    page, offset = (x.reshape(rows) for x in slot_mapping)
    tokens = Tokens(heads.reshape(rows, -1, H), cos, sin, page, offset, new_heads.gains)
    first = len(jax.tree.leaves(tokens))
    shapes = [jax.ShapeDtypeStruct((rows, N, H), heads.dtype)]
    moved = 2 * heads.nbytes + 4 * rows * (2 * tokens.cos.shape[1] + 2)
    with jax.named_scope(f"bytes_accessed:{moved}"):  # the planner reads the bytes from the HLO scope
        q, keys, values = pl.pallas_call(
            partial(rope_kernel, norm=new_heads.norm),
            grid=(rows, K),
            out_shape=shapes + [jax.ShapeDtypeStruct(pool.shape, pool.dtype) for pool in pools],
            input_output_aliases={first: 1, first + 1: 2},
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
            name="turn_and_write",
        )(tokens, *pools)
    return q.reshape(B, T, N, H), (keys, values)


def rope_kernel(tokens: Tokens, _: Any, __: Any, q: Any, keys: Any, values: Any, *, norm: NormKind | None):
    """Rotate the queries of one token and key head, and write its key and value (kernel body)."""
    row, head = pl.program_id(0), pl.program_id(1)
    N, K, P = q.shape[1], *keys.shape[:2]
    page, offset, zeros = tokens.page[row], tokens.offset[row], jnp.zeros(1, jnp.int32)
    member = jnp.arange(pl.next_power_of_2(N // K), dtype=jnp.int32)
    is_head = member < N // K
    # out of range: Pallas' interpreter writes masked elements too
    query_heads = jnp.where(is_head, head * (N // K) + member, N)
    for piece, x in rope_pieces(tokens, row, query_heads, 0, norm):
        store_piece(q, row, query_heads, value=x, mask=is_head, piece=piece)

    @pl.when(page < P)
    def _() -> None:
        for piece, x in rope_pieces(tokens, row, N + head + zeros, 1, norm):
            store_piece(keys, head, page, offset, value=x, mask=zeros == 0, piece=piece)
        x = load_piece(tokens.heads, row, N + K + head + zeros, piece=(0, keys.shape[3]))
        store_piece(values, head, page, offset, value=x, mask=zeros == 0)


def rope_pieces(
    tokens: Tokens, row: Any, heads: Int[Array, " heads"], gain_index: int, norm: NormKind | None
) -> list[tuple[Piece, Float[Array, "heads _"]]]:
    """Norm and rotate some heads of a token. Returns their pieces: both rotated halves, and the rest."""
    H, pairs = tokens.heads.shape[-1], tokens.cos.shape[-1]
    scale = None
    if norm is not None:
        values = load_piece(tokens.heads, row, heads, piece=(0, H)).astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(values * values, axis=-1, keepdims=True) + norm.eps)

    def norm_piece(piece: Piece) -> Float[Array, "heads _"]:
        """Load a piece of the heads, normed."""
        x = load_piece(tokens.heads, row, heads, piece=piece)
        if norm is None or scale is None:
            return x
        gain = None if tokens.gains[gain_index] is None else load_piece(tokens.gains[gain_index], piece=piece)
        return apply_gain(x.astype(jnp.float32) * scale, gain, norm, x.dtype)

    cos, sin = (load_piece(x, row, piece=(0, pairs))[None] for x in (tokens.cos, tokens.sin))
    left, right = (norm_piece((first, pairs)).astype(jnp.float32) for first in (0, pairs))
    pieces = [((0, pairs), left * cos - right * sin), ((pairs, pairs), right * cos + left * sin)]
    rest = (2 * pairs, H - 2 * pairs)
    return pieces if not rest[1] else [*pieces, (rest, norm_piece(rest))]

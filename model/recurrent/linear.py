"""Linear recurrences: a memory decays, is changed by a token's key and value, and is read by its query.

    S <- exp(decay) S;  S <- S + k (x) rate (v - S'k), or S + k (x) v without a rate;  out = S'q

A single token takes the step as written. A prefill takes blocks of STATE_BLOCK_TOKENS tokens. Within a block,
tokens affect each other by a triangular system without the memory (Yang et al., arXiv 2406.06484 and
2412.06464). Without a rate it is state space duality (Dao and Gu, arXiv 2405.21060). Everything is computed
in float32. A token's results depend on no later token, so blocks may be padded.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..layers import einsum, prevent_fma
from ..tree import pytree
from .kinds import STATE_BLOCK_TOKENS

Memory = Float[Array, "N B H U"]
RecurrenceOutputs = Float[Array, "B T N U"]
CumulativeDecay = tuple[Float[Array, "*blocks C size"], Float[Array, "*blocks C size"]]


@pytree
class Terms:
    """Coefficients of tokens in the recurrence, float32. Axes before the heads are [B] or [B,T]."""

    q: Any  # [...,N,H]
    k: Any  # [...,N,H]
    v: Any  # [...,N,U]
    decay: Any  # logarithm of the decay, [...,N], or [...,N,H] per key dimension
    rate: Any = None  # [...,N] of the delta rule; None: the value is added unchanged
    skip: Any = None  # [...,N,U], added to the output

    @property
    def has_decay_per_dimension(self) -> bool:
        """Return True if each key dimension has its own decay."""
        return self.decay.ndim == self.k.ndim


def exponentiate_decay(x: Terms) -> Terms:
    """Replace the logarithm of the decay by the decay itself, as `step_recurrence` takes it."""
    skip = None if x.skip is None else prevent_fma(x.skip)
    return replace(x, v=prevent_fma(x.v), decay=jnp.exp(x.decay), skip=skip)


def step_unfused(memory: Memory, x: Terms) -> tuple[Memory, Float[Array, "B N U"]]:
    """Run `step_recurrence` with the same bits as inside a scan.

    On a CPU an always-true `cond` keeps XLA from fusing exp() into the step. The fusion would change its last
    bit.
    """

    def step_on_cpu(memory: Memory, x: Terms) -> tuple[Memory, Float[Array, "B N U"]]:
        nothing = jnp.zeros(x.v.shape, x.v.dtype)
        return jax.lax.cond(
            jnp.any(x.decay <= 1), step_recurrence, lambda memory, x: (memory, nothing), memory, x
        )

    return jax.lax.platform_dependent(memory, x, cpu=step_on_cpu, default=step_recurrence)


def step_recurrence(memory: Memory, x: Terms) -> tuple[Memory, Float[Array, "B N U"]]:
    """Advance the memory by one token per row. Returns the new memory and the outputs. Takes terms after
    `exponentiate_decay`."""
    x = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), x)  # heads first
    remains = x.decay if x.has_decay_per_dimension else x.decay[..., None]
    memory = prevent_fma(memory * remains[..., None])
    change = x.v
    if x.rate is not None:
        change = x.rate[..., None] * (x.v - read_memory(memory, x.k))
    memory = memory + prevent_fma(x.k[..., None] * change[..., None, :])
    out = read_memory(memory, x.q)
    return memory, jnp.moveaxis(out if x.skip is None else out + x.skip, 0, 1)


def read_memory(memory: Memory, q: Float[Array, "N B H"]) -> Float[Array, "N B U"]:
    """Read a memory: its values, weighted by the products of their keys with q."""
    return jnp.sum(prevent_fma(memory * q[..., None]), axis=-2)


@pytree
class Blocks:
    """Coefficients of blocks of C tokens, [blocks,N,B,...].

    A block's change of the memory comes from its values and from the memory before it. Its outputs read that
    memory and that change.

    change_from_values: change from the block's values.
    change_from_memory: change from the memory before the block, None without a rate of the delta rule.
    output_from_memory: outputs from that memory.
    output_from_change: outputs from the change.
    key: memory after the block, from the change.
    decay: decay of the memory over the block.
    """

    change_from_values: Any  # [...,C,U]
    change_from_memory: Any  # [...,C,H], None without a rate
    output_from_memory: Any  # [...,C,H]
    output_from_change: Any  # [...,C,C]
    key: Any  # [...,C,H]
    decay: Any  # [...,H or 1]


def scan_blocks(
    memory: Memory,
    x: Terms,
    count: Int[Array, " B"],
    write: Callable[[Any, Int[Array, ""], Memory], Any],
    pools: Any,
) -> tuple[Any, RecurrenceOutputs]:
    """Take the first `count` of T tokens of each row through a memory, block by block.

    Calls `write(pools, j, memory)` after block j. Returns the last pools, and the outputs.
    """
    T = x.k.shape[1]
    blocks = compute_blocks(pad_to_blocks(x, count))

    def run_block(carry: tuple[Memory, Any], numbered_block: tuple[Int[Array, ""], Blocks]) -> Any:
        (memory, pools), (j, b) = carry, numbered_block
        change = (
            b.change_from_values
            if b.change_from_memory is None
            else b.change_from_values - einsum("nbch,nbhu->nbcu", b.change_from_memory, memory)
        )
        out = einsum("nbch,nbhu->nbcu", b.output_from_memory, memory) + einsum(
            "nbcs,nbsu->nbcu", b.output_from_change, change
        )
        memory = memory * b.decay[..., None] + einsum("nbch,nbcu->nbhu", b.key, change)
        return (memory, write(pools, j, memory)), out

    numbers = jnp.arange(blocks.key.shape[0], dtype=jnp.int32)
    (_, pools), out = jax.lax.scan(run_block, (memory, pools), (numbers, blocks))
    out = out.transpose(2, 0, 3, 1, 4).reshape(out.shape[2], -1, out.shape[1], out.shape[4])[:, :T]
    return pools, out if x.skip is None else out + x.skip


def pad_to_blocks(x: Terms, count: Int[Array, " B"]) -> Terms:
    """Pad tokens to whole blocks. Tokens after the first `count` change nothing."""
    T = x.k.shape[1]
    real = jnp.arange(T, dtype=jnp.int32)[None] < count[:, None]

    def mask_and_pad(leaf: Any) -> Any:
        leaf = jnp.where(real.reshape(*real.shape, *(1,) * (leaf.ndim - 2)), leaf, 0)
        return jnp.pad(leaf, ((0, 0), (0, -T % STATE_BLOCK_TOKENS), *((0, 0),) * (leaf.ndim - 2)))

    return jax.tree.map(mask_and_pad, Terms(x.q, x.k, x.v, x.decay, x.rate))


def compute_blocks(x: Terms) -> Blocks:
    """Compute the coefficients of all blocks at once."""

    def split_blocks(leaf: Any) -> Any:  # [B,T,N,...] -> [blocks,N,B,C,...]
        leaf = leaf.reshape(leaf.shape[0], -1, STATE_BLOCK_TOKENS, *leaf.shape[2:])
        return jnp.moveaxis(leaf, (1, 3), (0, 1))

    x = jax.tree.map(split_blocks, x)
    decay_sums = cumulative_decay(x.decay if x.has_decay_per_dimension else x.decay[..., None])
    decay_to_token = jnp.exp(sum(decay_sums))
    causal_mask = jnp.tril(jnp.ones((STATE_BLOCK_TOKENS, STATE_BLOCK_TOKENS), bool))
    decayed = partial(decayed_products, k=x.k, decay_sums=decay_sums)
    to_end = jnp.exp(sum(part[..., -1:, :] - part for part in decay_sums))
    output_from_memory, key, decay = x.q * decay_to_token, x.k * to_end, decay_to_token[..., -1, :]
    output_from_change = decayed(x.q, mask=causal_mask)
    if x.rate is None:
        return Blocks(x.v, None, output_from_memory, output_from_change, key, decay)
    rate = x.rate[..., None]
    solve = invert_unit_triangular(rate * decayed(x.k, mask=jnp.tril(causal_mask, -1)))
    change_from_memory = einsum("zxbcs,zxbsh->zxbch", solve, rate * x.k * decay_to_token)
    return Blocks(
        einsum("zxbcs,zxbsu->zxbcu", solve, rate * x.v),
        change_from_memory,
        output_from_memory,
        output_from_change,
        key,
        decay,
    )


def cumulative_decay(decay: Float[Array, "*blocks C size"]) -> CumulativeDecay:
    """Return the sums of a block's decays up to each token, and the rounding errors of these sums.

    After a token that forgets all, sums are large. Their differences alone would not tell the decay of later
    tokens.
    """
    total = jnp.cumsum(decay, axis=-2)
    return total, jnp.cumsum(decay - jnp.diff(total, axis=-2, prepend=0), axis=-2)


def decayed_products(
    q: Float[Array, "*blocks C H"],
    mask: Bool[Array, "C C"],
    k: Float[Array, "*blocks C H"],
    decay_sums: CumulativeDecay,
) -> Float[Array, "*blocks C C"]:
    """Compute the products of each token's query with the keys of its block that it may `mask`, decayed
    since those tokens."""
    since = sum(part[..., :, None, :] - part[..., None, :, :] for part in decay_sums)
    mask = jnp.expand_dims(mask[..., None], range(q.ndim - 2))
    weights = jnp.exp(jnp.where(mask, since, -jnp.inf))
    if weights.shape[-1] == 1:
        return einsum("zxbch,zxbsh->zxbcs", q, k) * weights[..., 0]
    # not a product of exp(sum) and exp(-sum): one of them would overflow
    return jnp.sum(q[..., :, None, :] * k[..., None, :, :] * weights, axis=-1)


def invert_unit_triangular(below: Float[Array, "*blocks C C"]) -> Float[Array, "*blocks C C"]:
    """Invert the unit lower-triangular matrices 1 + `below` by block doubling. C is a power of two.

    The inverses of two neighbouring diagonal blocks give that of the block of twice the size.
    """
    C = below.shape[-1]
    inverses = jnp.ones((*below.shape[:-2], C, 1, 1), below.dtype)
    size = 1
    while size < C:
        pairs = below.reshape(*below.shape[:-2], C // (2 * size), 2 * size, C // (2 * size), 2 * size)
        off_diagonal = jnp.moveaxis(jnp.diagonal(pairs, axis1=-4, axis2=-2), -1, -3)[..., size:, :size]
        first, last = inverses[..., 0::2, :, :], inverses[..., 1::2, :, :]
        corner = -jnp.matmul(last, jnp.matmul(off_diagonal, first, precision="highest"), precision="highest")
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        inverses = jnp.concatenate([top, jnp.concatenate([corner, last], axis=-1)], axis=-2)
        size *= 2
    return inverses[..., 0, :, :]

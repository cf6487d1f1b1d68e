"""Linear recurrences: a memory that fades, is changed by a token's key and value, and is asked by its query.

    S <- exp(decay) S;  S <- S + k (x) rate (v - S'k), or S + k (x) v without a rate;  out = S'q

A token alone takes the step as it stands. A prefill takes blocks of BLOCK tokens: what the tokens of a block
do to each other is a triangular system that does not know the memory (Yang et al., arXiv 2406.06484 and
2412.06464; without a rate it is state space duality, Dao and Gu, arXiv 2405.21060). Everything is computed
in float32. A token's results depend on no token behind it, so blocks may be padded.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..layers import einsum, rounded
from ..tree import pytree
from .kinds import BLOCK

Memory = Float[Array, "N B H U"]
Outputs = Float[Array, "B T N U"]
Fade = tuple[Float[Array, "*blocks C size"], Float[Array, "*blocks C size"]]


@pytree
class Terms:
    """Coefficients of tokens in the recurrence, float32. Axes before the heads are [B] or [B,T]."""

    q: Any  # [...,N,H]
    k: Any  # [...,N,H]
    v: Any  # [...,N,U]
    decay: Any  # logarithm of what remains, [...,N], or [...,N,H] of each key dimension
    rate: Any = None  # [...,N] of the delta rule; None adds the value as it is
    skip: Any = None  # [...,N,U], added to the output

    @property
    def by_dimension(self) -> bool:
        """True if each key dimension has a decay of its own."""
        return self.decay.ndim == self.k.ndim


def faded(x: Terms) -> Terms:
    """The same with what remains in place of its logarithm, as `step` takes it."""
    skip = None if x.skip is None else rounded(x.skip)
    return replace(x, v=rounded(x.v), decay=jnp.exp(x.decay), skip=skip)


def lone_step(memory: Memory, x: Terms) -> tuple[Memory, Float[Array, "B N U"]]:
    """`step` as a loop computes it, of terms that are there: a CPU would compute them once more inside of it,
    and bits of an exponential depend on the loop that it stands in. The branch is always taken."""

    def on_cpu(memory: Memory, x: Terms) -> tuple[Memory, Float[Array, "B N U"]]:
        nothing = jnp.zeros(x.v.shape, x.v.dtype)
        return jax.lax.cond(jnp.any(x.decay <= 1), step, lambda memory, x: (memory, nothing), memory, x)

    return jax.lax.platform_dependent(memory, x, cpu=on_cpu, default=step)


def step(memory: Memory, x: Terms) -> tuple[Memory, Float[Array, "B N U"]]:
    """The memory after one token of each row, whose terms are `faded`, and the token's output."""
    x = jax.tree.map(lambda leaf: jnp.moveaxis(leaf, 1, 0), x)  # heads first
    remains = x.decay if x.by_dimension else x.decay[..., None]
    memory = rounded(memory * remains[..., None])
    change = x.v
    if x.rate is not None:
        change = x.rate[..., None] * (x.v - read_out(memory, x.k))
    memory = memory + rounded(x.k[..., None] * change[..., None, :])
    out = read_out(memory, x.q)
    return memory, jnp.moveaxis(out if x.skip is None else out + x.skip, 0, 1)


def read_out(memory: Memory, q: Float[Array, "N B H"]) -> Float[Array, "N B U"]:
    """A memory's answer: its values, weighted by how much their keys are like q."""
    return jnp.sum(rounded(memory * q[..., None]), axis=-2)


@pytree
class Blocks:
    """Coefficients of blocks of C tokens, [blocks,N,B,...]. `solved` and `read`: the change of the memory,
    from a block's values and from the memory before it. `asking` and `mixed`: the outputs, from the memory
    and from that change. `key` and `left`: the memory after the block."""

    solved: Any  # [...,C,U]
    read: Any  # [...,C,H], None without a rate
    asking: Any  # [...,C,H]
    mixed: Any  # [...,C,C]
    key: Any  # [...,C,H]
    left: Any  # [...,H or 1]


def scan(
    memory: Memory,
    x: Terms,
    count: Int[Array, " B"],
    write: Callable[[Any, Int[Array, ""], Memory], Any],
    pools: Any,
) -> tuple[Any, Outputs]:
    """Take `count` of T tokens of each row through a memory, block by block. Calls `write(pools, j, memory)`
    after block j; returns the last pools, and the outputs."""
    T = x.k.shape[1]
    blocks = in_blocks(padded(x, count))

    def block(carry: tuple[Memory, Any], own: tuple[Int[Array, ""], Blocks]) -> Any:
        (memory, pools), (j, b) = carry, own
        change = b.solved if b.read is None else b.solved - einsum("nbch,nbhu->nbcu", b.read, memory)
        out = einsum("nbch,nbhu->nbcu", b.asking, memory) + einsum("nbcs,nbsu->nbcu", b.mixed, change)
        memory = memory * b.left[..., None] + einsum("nbch,nbcu->nbhu", b.key, change)
        return (memory, write(pools, j, memory)), out

    numbers = jnp.arange(blocks.key.shape[0], dtype=jnp.int32)
    (_, pools), out = jax.lax.scan(block, (memory, pools), (numbers, blocks))
    out = out.transpose(2, 0, 3, 1, 4).reshape(out.shape[2], -1, out.shape[1], out.shape[4])[:, :T]
    return pools, out if x.skip is None else out + x.skip


def padded(x: Terms, count: Int[Array, " B"]) -> Terms:
    """Whole blocks of tokens, of which those behind `count` change nothing."""
    T = x.k.shape[1]
    real = jnp.arange(T, dtype=jnp.int32)[None] < count[:, None]

    def only(leaf: Any) -> Any:
        leaf = jnp.where(real.reshape(*real.shape, *(1,) * (leaf.ndim - 2)), leaf, 0)
        return jnp.pad(leaf, ((0, 0), (0, -T % BLOCK), *((0, 0),) * (leaf.ndim - 2)))

    return jax.tree.map(only, Terms(x.q, x.k, x.v, x.decay, x.rate))


def in_blocks(x: Terms) -> Blocks:
    """Coefficients of all blocks, computed at once."""

    def cut(leaf: Any) -> Any:  # [B,T,N,...] -> [blocks,N,B,C,...]
        leaf = leaf.reshape(leaf.shape[0], -1, BLOCK, *leaf.shape[2:])
        return jnp.moveaxis(leaf, (1, 3), (0, 1))

    x = jax.tree.map(cut, x)
    fade = since_began(x.decay if x.by_dimension else x.decay[..., None])
    each = jnp.exp(sum(fade))
    reach = jnp.tril(jnp.ones((BLOCK, BLOCK), bool))
    alike = partial(related, k=x.k, fade=fade)
    to_end = jnp.exp(sum(part[..., -1:, :] - part for part in fade))
    asking, key, left = x.q * each, x.k * to_end, each[..., -1, :]
    mixed = alike(x.q, reach=reach)
    if x.rate is None:
        return Blocks(x.v, None, asking, mixed, key, left)
    rate = x.rate[..., None]
    solve = inverse(rate * alike(x.k, reach=jnp.tril(reach, -1)))
    read = einsum("zxbcs,zxbsh->zxbch", solve, rate * x.k * each)
    return Blocks(einsum("zxbcs,zxbsu->zxbcu", solve, rate * x.v), read, asking, mixed, key, left)


def since_began(decay: Float[Array, "*blocks C size"]) -> Fade:
    """Sums of a block's decays up to each token, and what rounding left out of them: after a token that
    forgets all, sums are too large to tell from their differences alone what remains of those behind it."""
    total = jnp.cumsum(decay, axis=-2)
    return total, jnp.cumsum(decay - jnp.diff(total, axis=-2, prepend=0), axis=-2)


def related(
    q: Float[Array, "*blocks C H"], reach: Bool[Array, "C C"], k: Float[Array, "*blocks C H"], fade: Fade
) -> Float[Array, "*blocks C C"]:
    """Products of each token's query with the keys of its block that it may `reach`, faded since those
    tokens."""
    since = sum(part[..., :, None, :] - part[..., None, :, :] for part in fade)
    reach = jnp.expand_dims(reach[..., None], range(q.ndim - 2))
    weights = jnp.exp(jnp.where(reach, since, -jnp.inf))
    if weights.shape[-1] == 1:
        return einsum("zxbch,zxbsh->zxbcs", q, k) * weights[..., 0]
    # no product of two factors: one of them would be too large for a float
    return jnp.sum(q[..., :, None, :] * k[..., None, :, :] * weights, axis=-1)


def inverse(below: Float[Array, "*blocks C C"]) -> Float[Array, "*blocks C C"]:
    """The inverse of 1 + `below`, which is zero but under its diagonal, C a power of two: that of two halves
    is known, first of single rows, and gives the whole's."""
    C = below.shape[-1]
    found = jnp.ones((*below.shape[:-2], C, 1, 1), below.dtype)
    size = 1
    while size < C:
        pairs = below.reshape(*below.shape[:-2], C // (2 * size), 2 * size, C // (2 * size), 2 * size)
        own = jnp.moveaxis(jnp.diagonal(pairs, axis1=-4, axis2=-2), -1, -3)[..., size:, :size]
        first, last = found[..., 0::2, :, :], found[..., 1::2, :, :]
        corner = -jnp.matmul(last, jnp.matmul(own, first, precision="highest"), precision="highest")
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        found = jnp.concatenate([top, jnp.concatenate([corner, last], axis=-1)], axis=-2)
        size *= 2
    return found[..., 0, :, :]

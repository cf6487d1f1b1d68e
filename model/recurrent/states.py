"""A recurrent layer's state, how tokens take it on, and the seam to where states are kept."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..layers import biased, rounded
from ..tree import pytree
from . import linear
from .kinds import BLOCK, Leaves

Part = Float[Array, "B T _ _"]  # inputs of one convolution, [B,T,heads,size]
Seen = Float[Array, "B _ _ _"]  # and those before them that its kernel spans
Pools = Any  # where states are written


@pytree
class RecurrentState:
    """State of a layer after some tokens, float32. `tails`: newest inputs of each convolution
    [heads,B,kernel-1,size]. `memory`: [heads,B,H,U] or None. Heads are first, as in every pool."""

    tails: tuple[Any, ...]
    memory: Any = None


@pytree
class RecurrentInputs:
    """New tokens as a recurrent layer's state sees them, [B,T,...]."""

    parts: tuple[Any, ...]  # of each convolution [B,T,heads,size]
    beside: Any = None  # what else `terms` is told

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and tokens, B and T."""
        return jax.tree.leaves(self)[0].shape[:2]


@pytree
class Convolution:
    """A short causal convolution of each channel by itself."""

    weight: Any  # [heads,size,kernel]
    bias: Any = None  # [heads,size]


@dataclass(frozen=True)
class Recurrence:
    """Update of a layer's state by tokens: short convolutions, then a linear recurrence over the `terms` made
    of their outputs. Without `terms` the first convolution's outputs are the layer's."""

    leaves: Leaves  # what it keeps
    convolutions: tuple[Convolution, ...]
    activation: Callable[[Array], Array] | None = None
    terms: Callable[[tuple[Part, ...], Any], linear.Terms] | None = None

    def step(
        self, state: RecurrentState, new: RecurrentInputs
    ) -> tuple[RecurrentState, Float[Array, "B 1 N U"]]:
        """The state after one token of each row [B,1,...], and its output."""
        seen = self.seen(state, new.parts)
        tails, found = self.tails(seen), self.one(seen, new.beside)
        if not isinstance(found, linear.Terms):
            return RecurrentState(tails), found
        memory, out = linear.lone_step(state.memory, jax.tree.map(lambda x: x[:, 0], found))
        return RecurrentState(tails, memory), out[:, None]

    def tails(self, seen: list[Seen]) -> tuple[Any, ...]:
        """Tails of the convolutions after one token."""
        return tuple(jnp.moveaxis(x[:, 1:], (2, 1), (0, 2)) for x in seen)

    def one(self, seen: list[Seen], beside: Any) -> linear.Terms | Part:
        """Terms of single tokens, from as many inputs as each kernel spans; without a recurrence the layer's
        outputs."""
        parts = self._convolved(seen, 1)
        return parts[0] if self.terms is None else linear.faded(self.terms(parts, beside))

    def seen(self, state: RecurrentState, parts: tuple[Part, ...]) -> list[Seen]:
        """Inputs of each convolution: its tail, then the new ones."""
        tails = (jnp.moveaxis(tail, (0, 2), (2, 1)) for tail in state.tails)
        return [
            jnp.concatenate([tail, part.astype(jnp.float32)], axis=1)
            for tail, part in zip(tails, parts, strict=True)
        ]

    def scan(
        self,
        state: RecurrentState,
        new: RecurrentInputs,
        count: Int[Array, " B"],
        write: Callable[[Pools, Int[Array, ""], RecurrentState], Pools],
        pools: Pools,
    ) -> tuple[Pools, Float[Array, "B T N U"]]:
        """Take `count` of T tokens of each row through the state, block by block. Calls `write(pools, j,
        state)` after block j; returns the last pools, and the outputs."""
        seen, T = self.seen(state, new.parts), new.shape[1]
        parts = self._convolved(seen, T)

        def after(pools: Pools, j: Int[Array, ""], memory: Any) -> Pools:
            end = jnp.minimum((j + 1) * BLOCK, count)
            return write(pools, j, RecurrentState(tuple(newest(x, end, T) for x in seen), memory))

        if self.terms is None:
            return jax.lax.fori_loop(0, -(-T // BLOCK), lambda j, x: after(x, j, None), pools), parts[0]
        return linear.scan(state.memory, self.terms(parts, new.beside), count, after, pools)

    def _convolved(self, seen: list[Seen], T: int) -> tuple[Part, ...]:
        found = (convolved(own, x, T) for own, x in zip(self.convolutions, seen, strict=True))
        return tuple(x if self.activation is None else self.activation(x) for x in found)


def convolved(own: Convolution, x: Seen, T: int) -> Part:
    """Each of the last T tokens with those before it, as many as the kernel spans, in float32."""
    kernel = own.weight.astype(jnp.float32)[None, None]
    out = rounded(x[:, :T] * kernel[..., 0])
    for i in range(1, kernel.shape[-1]):
        out = out + x[:, i : i + T] * kernel[..., i]
    return biased(out, None if own.bias is None else own.bias.astype(jnp.float32))


def newest(x: Seen, end: Int[Array, " B"], T: int) -> Float[Array, "heads B before size"]:
    """Tail of a convolution after `end` of T new tokens, cut from all its inputs."""
    at = end[:, None] + jnp.arange(x.shape[1] - T, dtype=jnp.int32)[None]
    return jnp.moveaxis(jnp.take_along_axis(x, at[..., None, None], axis=1), (2, 1), (0, 2))


def empty_state(leaves: Leaves, rows: int) -> RecurrentState:
    """State of rows without a token: zeros."""

    def zeros(shape: tuple[int, int, int]) -> Float[Array, "heads B ..."]:
        return jnp.zeros((shape[0], rows, *shape[1:]), jnp.float32)

    memory = None if leaves.memory is None else zeros(leaves.memory)
    return RecurrentState(tuple(map(zeros, leaves.tails)), memory)


@runtime_checkable
class Recur(Protocol):
    """The seam between recurrent layers and every cache of states.

    Takes the seam's state, the layer's number, the recurrence, and new tokens; returns the seam's new state,
    and the outputs [B,T,N,U] in float32.
    """

    def recur(
        self, state: Any, layer: int, recurrence: Recurrence, new: RecurrentInputs, /
    ) -> tuple[Any, Float[Array, "B T N U"]]: ...

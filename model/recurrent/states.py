"""A recurrent layer's state, its update by tokens, and the seam to the caches that keep states."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..layers import add_bias, prevent_fma
from ..tree import pytree
from . import linear
from .kinds import STATE_BLOCK_TOKENS, StateShapes

ConvInputs = Float[Array, "B T _ _"]  # inputs of one convolution, [B,T,heads,size]
ConvWindow = Float[Array, "B _ _ _"]  # the same, after those before them that its kernel spans
StatePools = Any  # of states, by page


@pytree
class RecurrentState:
    """State of a layer after some tokens, float32. Heads are the first axis, as in every pool.

    tails, [heads,B,kernel-1,size]: newest inputs of each convolution.
    memory, [heads,B,H,U]: memory of the linear recurrence, or None.
    """

    tails: tuple[Any, ...]
    memory: Any = None


@pytree
class RecurrentInputs:
    """Inputs of new tokens to a recurrent layer, [B,T,...].

    conv_inputs: inputs of each convolution, [B,T,heads,size].
    extras: other inputs of `Recurrence.make_terms`, or None.
    """

    conv_inputs: tuple[Any, ...]  # each [B,T,heads,size]
    extras: Any = None  # [B,T,...]

    @property
    def shape(self) -> tuple[int, int]:
        """Return the numbers of rows and tokens, B and T."""
        return jax.tree.leaves(self)[0].shape[:2]


@pytree
class Convolution:
    """A short causal convolution of each channel by itself."""

    weight: Any  # [heads,size,kernel]
    bias: Any = None  # [heads,size]


@dataclass(frozen=True)
class Recurrence:
    """Update of a layer's state by tokens: short convolutions, then a linear recurrence.

    state_shapes: shapes of the state.
    convolutions: the short convolutions.
    activation: activation of their outputs, or None.
    make_terms: function from these outputs and other inputs to terms of the linear recurrence. None: the
        first convolution's outputs are the layer's.
    """

    state_shapes: StateShapes  # of one row
    convolutions: tuple[Convolution, ...]
    activation: Callable[[Array], Array] | None = None
    make_terms: Callable[[tuple[ConvInputs, ...], Any], linear.Terms] | None = None

    def step(
        self, state: RecurrentState, inputs: RecurrentInputs
    ) -> tuple[RecurrentState, Float[Array, "B 1 N U"]]:
        """Advance the state by one token of each row, [B,1,...]. Returns the new state and the output."""
        windows = self.conv_windows(state, inputs.conv_inputs)
        tails, terms = self.next_tails(windows), self.step_terms(windows, inputs.extras)
        if not isinstance(terms, linear.Terms):
            return RecurrentState(tails), terms
        memory, out = linear.step_unfused(state.memory, jax.tree.map(lambda x: x[:, 0], terms))
        return RecurrentState(tails, memory), out[:, None]

    def next_tails(self, windows: list[ConvWindow]) -> tuple[Any, ...]:
        """Return the tails of the convolutions after one token."""
        return tuple(jnp.moveaxis(x[:, 1:], (2, 1), (0, 2)) for x in windows)

    def step_terms(self, windows: list[ConvWindow], extras: Any) -> linear.Terms | ConvInputs:
        """Return the terms of single tokens, from as many inputs as each kernel spans.

        Without a linear recurrence, returns the layer's outputs.
        """
        conv_outputs = self._convolve(windows, 1)
        return (
            conv_outputs[0]
            if self.make_terms is None
            else linear.exponentiate_decay(self.make_terms(conv_outputs, extras))
        )

    def conv_windows(self, state: RecurrentState, conv_inputs: tuple[ConvInputs, ...]) -> list[ConvWindow]:
        """Return the inputs that each convolution reads: its tail, then the new ones."""
        tails = (jnp.moveaxis(tail, (0, 2), (2, 1)) for tail in state.tails)
        return [
            jnp.concatenate([tail, part.astype(jnp.float32)], axis=1)
            for tail, part in zip(tails, conv_inputs, strict=True)
        ]

    def scan(
        self,
        state: RecurrentState,
        inputs: RecurrentInputs,
        count: Int[Array, " B"],
        write: Callable[[StatePools, Int[Array, ""], RecurrentState], StatePools],
        pools: StatePools,
    ) -> tuple[StatePools, Float[Array, "B T N U"]]:
        """Take the first `count` of T tokens of each row through the state, block by block.

        Calls `write(pools, j, state)` after block j. Returns the last pools, and the outputs.
        """
        windows, T = self.conv_windows(state, inputs.conv_inputs), inputs.shape[1]
        conv_outputs = self._convolve(windows, T)

        def write_after_block(pools: StatePools, j: Int[Array, ""], memory: Any) -> StatePools:
            end = jnp.minimum((j + 1) * STATE_BLOCK_TOKENS, count)
            return write(pools, j, RecurrentState(tuple(slice_tail(x, end, T) for x in windows), memory))

        if self.make_terms is None:
            return jax.lax.fori_loop(
                0, -(-T // STATE_BLOCK_TOKENS), lambda j, x: write_after_block(x, j, None), pools
            ), conv_outputs[0]
        return linear.scan_blocks(
            state.memory, self.make_terms(conv_outputs, inputs.extras), count, write_after_block, pools
        )

    def _convolve(self, windows: list[ConvWindow], T: int) -> tuple[ConvInputs, ...]:
        conv_outputs = (
            convolve(convolution, x, T) for convolution, x in zip(self.convolutions, windows, strict=True)
        )
        return tuple(x if self.activation is None else self.activation(x) for x in conv_outputs)


def convolve(convolution: Convolution, x: ConvWindow, T: int) -> ConvInputs:
    """Convolve the last T tokens with as many tokens before each as the kernel spans, in float32."""
    kernel = convolution.weight.astype(jnp.float32)[None, None]
    out = prevent_fma(x[:, :T] * kernel[..., 0])
    for i in range(1, kernel.shape[-1]):
        out = out + x[:, i : i + T] * kernel[..., i]
    return add_bias(out, None if convolution.bias is None else convolution.bias.astype(jnp.float32))


def slice_tail(x: ConvWindow, end: Int[Array, " B"], T: int) -> Float[Array, "heads B before size"]:
    """Return the tail of a convolution after `end` of T new tokens, cut from all its inputs."""
    at = end[:, None] + jnp.arange(x.shape[1] - T, dtype=jnp.int32)[None]
    return jnp.moveaxis(jnp.take_along_axis(x, at[..., None, None], axis=1), (2, 1), (0, 2))


def empty_recurrent_state(shapes: StateShapes, rows: int) -> RecurrentState:
    """Return the state of `rows` rows without a token: zeros."""

    def zeros(shape: tuple[int, int, int]) -> Float[Array, "heads B ..."]:
        return jnp.zeros((shape[0], rows, *shape[1:]), jnp.float32)

    memory = None if shapes.memory is None else zeros(shapes.memory)
    return RecurrentState(tuple(map(zeros, shapes.tails)), memory)


@runtime_checkable
class RecurrentAttend(Protocol):
    """Seam between recurrent layers and every cache of states.

    Takes the seam's state, the layer's number, the recurrence, and new tokens. Returns the seam's new state,
    and the outputs [B,T,N,U] in float32.
    """

    def run_recurrence(
        self, state: Any, layer: int, recurrence: Recurrence, inputs: RecurrentInputs, /
    ) -> tuple[Any, Float[Array, "B T N U"]]: ...

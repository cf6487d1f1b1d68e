"""Sizes of mixers that keep a recurrent state instead of keys. Frozen and hashable, like all sizes of a
model."""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

STATE_WINDOW = -1  # in place of a window: the layer reads a state instead of the tokens before
STATE_BLOCK_TOKENS = 64  # tokens that a prefill takes through a state at once; blocks begin at its multiples


class StateShapes(NamedTuple):
    """Shapes of a layer's state, the heads of each array first.

    tails: newest inputs of the short convolutions, [heads,kernel-1,size] each.
    memory: memory of a linear recurrence, [heads,key size,value size], or None.
    """

    tails: tuple[tuple[int, int, int], ...]
    memory: tuple[int, int, int] | None = None

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Return the shapes of all arrays of the state: the tails, then the memory."""
        return self.tails if self.memory is None else (*self.tails, self.memory)


@dataclass(frozen=True)
class DeltaNet:
    """Gated DeltaNet (Yang et al., arXiv 2412.06464): the gated delta rule after short convolutions.

    `decay_rank`: each key dimension has its own decay, projected through this many dimensions (Kimi Delta
    Attention, arXiv 2510.26692). None: each head has one decay.
    """

    key_heads: int  # K
    value_heads: int  # N, a multiple of K
    key_size: int  # H
    value_size: int  # U
    kernel: int = 4  # tokens of a convolution
    eps: float = 1e-6  # of the outputs' norm
    gate: Literal["silu", "sigmoid"] = "silu"  # of the normed outputs
    gate_rank: int | None = None  # rank of the gate's projection; None: directly from x
    decay_rank: int | None = None

    window: ClassVar[int] = STATE_WINDOW
    cache_sharding_weight: ClassVar[str] = "k"

    def __post_init__(self):
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads {self.value_heads} is not a multiple of key_heads {self.key_heads}"
            )

    @property
    def state_shapes(self) -> StateShapes:
        key = (self.key_heads, self.kernel - 1, self.key_size)
        value = (self.key_heads, self.kernel - 1, self.groups * self.value_size)
        return StateShapes((key, key, value), (self.value_heads, self.key_size, self.value_size))

    @property
    def groups(self) -> int:
        """Return G, the number of value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def num_heads(self) -> int:
        return self.value_heads

    @property
    def head_sizes(self) -> tuple[int, int]:
        return self.key_size, self.value_size

    @property
    def pair_flops(self) -> int:
        """Return the operations of a token: the state decays, is read twice, and changes."""
        return 7 * self.value_heads * self.key_size * self.value_size


@dataclass(frozen=True)
class ShortConv:
    """A gated short convolution (LFM2, Liquid AI, arXiv 2511.23404). Its state is its newest inputs.

    Channels stand in heads only so that devices can split them.
    """

    heads: int  # K
    size: int  # channels of a head, H
    kernel: int = 3  # tokens
    bias: bool = False  # of the convolution and of the projections around it

    window: ClassVar[int] = STATE_WINDOW
    cache_sharding_weight: ClassVar[str] = "v"

    @property
    def state_shapes(self) -> StateShapes:
        return StateShapes(((self.heads, self.kernel - 1, self.size),))

    @property
    def num_heads(self) -> int:
        return self.heads

    @property
    def key_heads(self) -> int:
        return self.heads

    @property
    def head_sizes(self) -> tuple[int, int]:
        return self.size, self.size

    @property
    def pair_flops(self) -> int:
        """Return the operations of a token: the convolution, and a product before and after it."""
        return (2 * self.kernel + 2) * self.heads * self.size


@dataclass(frozen=True)
class Mamba:
    """Mamba-2 (Dao and Gu, arXiv 2405.21060) in terms of attention.

    A key head is a group of B and C. It has several value heads, each with its own decay and step.
    """

    key_heads: int  # K
    num_heads: int  # N, a multiple of K
    key_size: int  # of a head's state, H
    value_size: int  # U
    kernel: int = 4  # tokens of a convolution
    conv_bias: bool = True
    bias: bool = False  # of the projections of the input
    output_bias: bool = False
    step_limits: tuple[float, float] = (0.0, float("inf"))
    norm: Literal["of gated", "then gated"] | None = "of gated"  # over a key head's value heads
    eps: float = 1e-5
    scales: tuple[float, ...] = (1.0,) * 5  # of gates, values, keys, queries, steps

    window: ClassVar[int] = STATE_WINDOW
    cache_sharding_weight: ClassVar[str] = "k"

    def __post_init__(self):
        if self.num_heads % self.key_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of key_heads {self.key_heads}")

    @property
    def state_shapes(self) -> StateShapes:
        key = (self.key_heads, self.kernel - 1, self.key_size)
        value = (self.key_heads, self.kernel - 1, self.groups * self.value_size)
        return StateShapes((value, key, key), (self.num_heads, self.key_size, self.value_size))

    @property
    def groups(self) -> int:
        """Return G, the number of value heads of a key head."""
        return self.num_heads // self.key_heads

    @property
    def head_sizes(self) -> tuple[int, int]:
        return self.key_size, self.value_size

    @property
    def pair_flops(self) -> int:
        """Return the operations of a token: the state decays, is added to, and is read."""
        return 5 * self.num_heads * self.key_size * self.value_size

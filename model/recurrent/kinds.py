"""Sizes of mixers that keep a state in place of keys. Frozen and hashable, as all sizes of a model."""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

STATE = -1  # in place of a window: of the tokens before it a layer sees the state that they have left
BLOCK = 64  # tokens that a prefill takes through a state at once, from a multiple of it on


class Leaves(NamedTuple):
    """Shapes of a layer's state, the heads of each array first. `tails` are the newest inputs of short
    convolutions, `memory` [heads,key size,value size] is what a linear recurrence keeps, if there is one."""

    tails: tuple[tuple[int, int, int], ...]
    memory: tuple[int, int, int] | None = None

    @property
    def shapes(self) -> tuple[tuple[int, int, int], ...]:
        """Shapes of all that a layer keeps: tails, then the memory."""
        return self.tails if self.memory is None else (*self.tails, self.memory)


@dataclass(frozen=True)
class DeltaNet:
    """Gated DeltaNet (Yang et al., arXiv 2412.06464): the gated delta rule behind short convolutions.

    `decay_rank`: with it every key dimension has a decay of its own, projected through this many dimensions
    (Kimi Delta Attention, arXiv 2510.26692).
    """

    key_heads: int  # K
    value_heads: int  # N, a multiple of K
    key_size: int  # H
    value_size: int  # U
    kernel: int = 4  # tokens of a convolution
    eps: float = 1e-6  # of the outputs' norm
    gate: Literal["silu", "sigmoid"] = "silu"  # of the normed outputs
    gate_rank: int | None = None  # dimensions that the gate is made through; None is straight from x
    decay_rank: int | None = None

    window: ClassVar[int] = STATE
    cached_by: ClassVar[str] = "k"

    def __post_init__(self):
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"value_heads {self.value_heads} is not a multiple of key_heads {self.key_heads}"
            )

    @property
    def state(self) -> Leaves:
        key = (self.key_heads, self.kernel - 1, self.key_size)
        value = (self.key_heads, self.kernel - 1, self.groups * self.value_size)
        return Leaves((key, key, value), (self.value_heads, self.key_size, self.value_size))

    @property
    def groups(self) -> int:
        """Value heads of a key head, G."""
        return self.value_heads // self.key_heads

    @property
    def num_heads(self) -> int:
        return self.value_heads

    @property
    def head_sizes(self) -> tuple[int, int]:
        return self.key_size, self.value_size

    @property
    def pair_flops(self) -> int:
        """Operations of a token: the state fades, is asked twice, and changed."""
        return 7 * self.value_heads * self.key_size * self.value_size


@dataclass(frozen=True)
class ShortConv:
    """A gated short convolution (LFM2, Liquid AI, arXiv 2511.23404): all that is kept are its newest inputs.

    Channels stand in heads only to be split over devices.
    """

    heads: int  # K
    size: int  # channels of a head, H
    kernel: int = 3  # tokens
    bias: bool = False  # of the convolution and of the projections around it

    window: ClassVar[int] = STATE
    cached_by: ClassVar[str] = "v"

    @property
    def state(self) -> Leaves:
        return Leaves(((self.heads, self.kernel - 1, self.size),))

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
        """Operations of a token: the convolution, and a product before and after it."""
        return (2 * self.kernel + 2) * self.heads * self.size


@dataclass(frozen=True)
class Mamba:
    """Mamba-2 (Dao and Gu, arXiv 2405.21060) in the words of attention: each key head, a group of B and C,
    has as many value heads, which have a decay and a step of their own."""

    key_heads: int  # K
    num_heads: int  # N, a multiple of K
    key_size: int  # of a head's state, H
    value_size: int  # U
    kernel: int = 4  # tokens of a convolution
    conv_bias: bool = True
    bias: bool = False  # of what is projected from the input
    output_bias: bool = False
    step_limits: tuple[float, float] = (0.0, float("inf"))
    norm: Literal["of gated", "then gated"] | None = "of gated"  # of the outputs of a key head's value heads
    eps: float = 1e-5
    scales: tuple[float, ...] = (1.0,) * 5  # of gates, values, keys, queries, steps

    window: ClassVar[int] = STATE
    cached_by: ClassVar[str] = "k"

    def __post_init__(self):
        if self.num_heads % self.key_heads:
            raise ValueError(f"num_heads {self.num_heads} is not a multiple of key_heads {self.key_heads}")

    @property
    def state(self) -> Leaves:
        key = (self.key_heads, self.kernel - 1, self.key_size)
        value = (self.key_heads, self.kernel - 1, self.groups * self.value_size)
        return Leaves((value, key, key), (self.num_heads, self.key_size, self.value_size))

    @property
    def groups(self) -> int:
        """Value heads of a key head, G."""
        return self.num_heads // self.key_heads

    @property
    def head_sizes(self) -> tuple[int, int]:
        return self.key_size, self.value_size

    @property
    def pair_flops(self) -> int:
        """Operations of a token: the state fades, is added to, and is asked."""
        return 5 * self.num_heads * self.key_size * self.value_size

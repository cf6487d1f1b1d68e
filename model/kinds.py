"""Mixers that keep keys, and norms: their sizes and kinds. Frozen and hashable."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from .rope import Rope

ROPE, NEIGHBOURS = Rope(), Rope(interleaved=True)


@dataclass(frozen=True)
class NormKind:
    """Root-mean-square or layer normalisation; a gain's stored numbers stand for `offset` more. Only the
    latter may have a `bias`. Some have no `gain`."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    offset: float = 0.0
    bias: bool = False
    gain: bool = True


PLAIN_NORM, LATENT_NORM = NormKind(), NormKind(eps=1e-6)


@dataclass(frozen=True)
class GroupedQuery:
    """Multi-head, multi-query or grouped-query attention (Ainslie et al., arXiv 2305.13245)."""

    num_heads: int  # N
    num_kv_heads: int  # K
    head_size: int  # H
    rope: Rope | None = ROPE
    rotary_size: int | None = None  # dimensions of a head that are turned; None is all
    scale: float | None = None  # of scores; None is head_size ** -0.5
    window: int | None = None  # keys that a query sees, itself included; None is all before it
    chunked: bool = False  # of the window only those behind the last multiple of its size (Llama 4)
    softcap: float | None = None  # scores are softcap * tanh(scores / softcap) (Gemma 2, arXiv 2408.00118)
    bias: bool = False  # of queries, keys and values
    output_bias: bool = False
    qk_norm: NormKind | None = None  # of queries and keys
    # the numbers that it norms together, and gains: a head's, with those of all heads alike; a head's, each
    # with its own; those of all heads
    qk_norm_over: Literal["head", "each head", "all heads"] = "head"
    norm_turned: bool = False  # queries and keys are normed after they are turned
    sinks: bool = False  # a learned score per head for seeing nothing (gpt-oss)
    gated: bool = False  # the output is multiplied by the sigmoid of a projection of the input
    value_norm: NormKind | None = None  # of values, without gains
    keys_as_values: bool = False  # values are made of what the projection of keys is, before norm and turn
    # Keys and values are those of the layer this many layers before it; 0 is its own
    # (cross-layer attention, Brandon et al., arXiv 2405.12981).
    borrows: int = 0

    state: ClassVar[None] = None
    can_share: ClassVar[bool] = True

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.rope and self.turned % 2:
            name = "head_size" if self.rotary_size is None else "rotary_size"
            raise ValueError(f"{name} {self.turned} is odd; rotary embeddings need pairs of dimensions")
        if self.turned > self.head_size:
            raise ValueError(f"rotary_size {self.turned} is more than head_size {self.head_size}")

    @property
    def turned(self) -> int:
        return self.head_size if self.rotary_size is None else self.rotary_size

    @property
    def cached(self) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
        """Heads and size of the keys and of the values that a token leaves in the cache."""
        row = None if self.borrows else (self.num_kv_heads, self.head_size)
        return row, row

    @property
    def cached_by(self) -> str | None:
        """The weight [D,K,H] whose heads are those of the cache, and are split over devices together with
        it."""
        return None if self.borrows else "k"

    @property
    def key_heads(self) -> int:
        """Heads of keys as attention reads them."""
        return self.num_kv_heads

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Sizes of a head's keys and values as attention reads them."""
        return self.head_size, self.head_size

    @property
    def pair_flops(self) -> int:
        """Operations for one query and one key in all heads: a score, and a weighted value."""
        return 4 * self.num_heads * self.head_size


@dataclass(frozen=True)
class Indexer:
    """Sizes of the indexer that selects the keys that a query of a latent layer sees (DeepSeek-V3.2, arXiv
    2512.02556)."""

    num_heads: int
    head_size: int  # of its queries, and of the one key that a token leaves for it in the cache
    keys: int | None  # how many; None is all


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): all heads read one row of `rank +
    rope_size` numbers."""

    num_heads: int  # N
    rank: int  # R, of the latent that keys and values are made from
    nope_size: int  # of a head's dimensions that have no position
    rope_size: int  # of those that are turned; the heads share one such key
    value_size: int
    query_rank: int | None = None  # queries are made from a latent too, unless it is None
    rope: Rope | None = NEIGHBOURS
    scale: float | None = None  # of scores; None is (nope_size + rope_size) ** -0.5
    bias: bool = False
    norm: NormKind = LATENT_NORM  # of the latents, whatever the model's own
    indexer: Indexer | None = None

    window: ClassVar[None] = None
    cached_by: ClassVar[None] = None  # the row that all heads share is whole on every device
    state: ClassVar[None] = None
    can_share: ClassVar[bool] = False  # a prefill makes the keys of each of its rows anew

    def __post_init__(self):
        if self.rope and self.rope_size % 2:
            raise ValueError(f"rope_size {self.rope_size} is odd; rotary embeddings need pairs of dimensions")

    @property
    def turned(self) -> int:
        return self.rope_size

    @property
    def cached(self) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """Heads and size of the cached row, shared by all heads and the source of values too, and of the
        indexer's keys, which lie in the place of values."""
        index = (1, self.indexer.head_size) if self.indexer and self.indexer.keys else None
        return (1, self.rank + self.rope_size), index

    @property
    def key_heads(self) -> int:
        """Heads of keys as a prefill makes them of latents."""
        return self.num_heads

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Sizes of a head's keys and values as a prefill makes them of latents."""
        return self.nope_size + self.rope_size, self.value_size

    @property
    def pair_flops(self) -> int:
        """Operations for one query and one key in all heads, where latents are read as they are."""
        return 2 * self.num_heads * (2 * self.rank + self.rope_size)

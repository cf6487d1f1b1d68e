"""Norms, and mixers that cache keys: their sizes and kinds. Frozen and hashable."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from .rope import Rope

DEFAULT_ROPE, INTERLEAVED_ROPE = Rope(), Rope(interleaved=True)


@dataclass(frozen=True)
class NormKind:
    """Root-mean-square or layer normalisation.

    kind: "rms" or "layer".
    eps: added to the mean square.
    offset: added to the stored gain.
    bias: True if there is a bias (layer norms only).
    gain: False if there is no gain.
    """

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
    rope: Rope | None = DEFAULT_ROPE
    rotary_size: int | None = None  # rotated dimensions of a head; None: all
    scale: float | None = None  # of scores; None is head_size ** -0.5
    window: int | None = None  # keys that a query sees, itself included; None: all before it
    chunked: bool = False  # keys before the last multiple of the window are hidden (Llama 4)
    softcap: float | None = None  # scores are softcap * tanh(scores / softcap) (Gemma 2, arXiv 2408.00118)
    bias: bool = False  # of queries, keys and values
    clip: float | None = None  # largest magnitude of projected queries, keys and values
    output_bias: bool = False
    qk_norm: NormKind | None = None  # of queries and keys
    # what one norm spans: a head, with one gain for all heads; a head, each with its own gain; all heads
    qk_norm_over: Literal["head", "each head", "all heads"] = "head"
    norm_after_rope: bool = False  # queries and keys are normed after the rotary embedding
    alibi: float | None = None  # steepest exponent of ALiBi's slopes (`alibi_slopes`), or none
    sinks: bool = False  # a learned score per head for seeing nothing (gpt-oss)
    gated: bool = False  # the output is multiplied by an activation of a projection of the input
    gate_activation: Literal["sigmoid", "softplus"] = "sigmoid"
    gate_per_head: bool = False  # one gate for each head, without a bias, in place of one for each dimension
    value_norm: NormKind | None = None  # of values, without gains
    keys_as_values: bool = False  # values are the projected keys, before norm and rotary embedding
    # Layers back to the layer whose keys and values are read; 0: the layer's own
    # (cross-layer attention, Brandon et al., arXiv 2405.12981).
    kv_layers_back: int = 0

    state_shapes: ClassVar[None] = None
    can_share_prefill: ClassVar[bool] = True

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if self.rope and self.rotary_dims % 2:
            name = "head_size" if self.rotary_size is None else "rotary_size"
            raise ValueError(f"{name} {self.rotary_dims} is odd; rotary embeddings need pairs of dimensions")
        if self.rotary_dims > self.head_size:
            raise ValueError(f"rotary_size {self.rotary_dims} is more than head_size {self.head_size}")

    @property
    def rotary_dims(self) -> int:
        """Return the number of a head's dimensions that are rotated."""
        return self.head_size if self.rotary_size is None else self.rotary_size

    @property
    def cache_shapes(self) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
        """Return (heads, head size) of the keys and of the values that a token has in the cache. None if
        borrowed."""
        row = None if self.kv_layers_back else (self.num_kv_heads, self.head_size)
        return row, row

    @property
    def cache_sharding_weight(self) -> str | None:
        """Return the field of the weight [D,K,H] whose heads are split over devices together with the
        cache's."""
        return None if self.kv_layers_back else "k"

    @property
    def key_heads(self) -> int:
        """Return the number of key heads that attention reads."""
        return self.num_kv_heads

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Return the sizes of a head's keys and values that attention reads."""
        return self.head_size, self.head_size

    @property
    def pair_flops(self) -> int:
        """Return the operations for one query and one key in all heads: a score, and a weighted value."""
        return 4 * self.num_heads * self.head_size


def has_fusible_rope(c: GroupedQuery) -> bool:
    """Return True if norm and rotary embedding can be fused: norms of single heads, rotation in halves, own
    keys."""
    in_halves = c.rope is not None and not c.rope.interleaved and not c.rope.query_growth
    return in_halves and c.qk_norm_over == "head" and not c.norm_after_rope and not c.kv_layers_back


@dataclass(frozen=True)
class Indexer:
    """Sizes of the indexer that selects the keys that a latent layer's query sees (DeepSeek-V3.2, arXiv
    2512.02556)."""

    num_heads: int
    head_size: int  # of its queries, and of a token's one key in the cache
    top_k: int | None  # number of keys that a query sees; None: all
    interleaved: bool = False  # its pairs of dimensions are two neighbours (GLM-5), not one of each half


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434). All heads read one row of `rank +
    rope_size` numbers."""

    num_heads: int  # N
    rank: int  # R, of the latent that keys and values are made from
    nope_size: int  # dimensions of a head without a position
    rope_size: int  # rotated dimensions of a head; the heads share one rotated key
    value_size: int
    query_rank: int | None = None  # queries are made from a latent too, unless it is None
    rope: Rope | None = INTERLEAVED_ROPE
    scale: float | None = None  # of scores; None is (nope_size + rope_size) ** -0.5
    bias: bool = False
    norm: NormKind = LATENT_NORM  # of the latents, independent of the model's norm
    indexer: Indexer | None = None

    window: ClassVar[None] = None
    cache_sharding_weight: ClassVar[None] = None  # every device holds the whole row
    state_shapes: ClassVar[None] = None
    can_share_prefill: ClassVar[bool] = False  # a prefill expands the keys of each of its rows again

    def __post_init__(self):
        if self.rope and self.rope_size % 2:
            raise ValueError(f"rope_size {self.rope_size} is odd; rotary embeddings need pairs of dimensions")

    @property
    def rotary_dims(self) -> int:
        """Return the number of a head's dimensions that are rotated."""
        return self.rope_size

    @property
    def cache_shapes(self) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """Return (heads, size) of the cached row and of the indexer's keys, or None for the latter.

        All heads share the row, and it is the source of values too. The indexer's keys use the pool of
        values.
        """
        index = (1, self.indexer.head_size) if self.indexer and self.indexer.top_k else None
        return (1, self.rank + self.rope_size), index

    @property
    def key_heads(self) -> int:
        """Return the number of key heads that a prefill expands from latents."""
        return self.num_heads

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Return the sizes of a head's keys and values that a prefill expands from latents."""
        return self.nope_size + self.rope_size, self.value_size

    @property
    def pair_flops(self) -> int:
        """Return the operations for one query and one key in all heads, if rows are read in place."""
        return 2 * self.num_heads * (2 * self.rank + self.rope_size)

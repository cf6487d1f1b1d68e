"""What a decoder is before it has weights: sizes and kinds. Frozen and hashable, so it is static under
jit."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from .inputs.kinds import LayerInput
from .rope import Rope

ROPE, NEIGHBOURS = Rope(), Rope(interleaved=True)
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_silu"]


@dataclass(frozen=True)
class NormKind:
    """Root-mean-square or layer normalisation; a gain's stored numbers stand for `offset` more. Only the
    latter may have a `bias`. Some have no `gain`."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-5
    offset: float = 0.0
    bias: bool = False
    gain: bool = True


LATENT_NORM = NormKind(eps=1e-6)


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
    value_norm: NormKind | None = None  # of values, without gains
    keys_as_values: bool = (
        False  # values are made of what the projection of keys is, before its norm and turn
    )
    # Keys and values are those of the layer so many before it, which it reads alike; 0 is its own
    # (cross-layer attention, Brandon et al., arXiv 2405.12981).
    borrows: int = 0

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
    def can_share(self) -> bool:
        """Whether a prompt may be cut into rows that share a call with those of other prompts."""
        return True

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
class Latent:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): all heads read one row of `rank +
    rope_size` numbers."""

    num_heads: int  # N
    rank: int  # R, of the latent that keys and values are made from
    nope_size: int  # of a head's dimensions that have no position
    rope_size: int  # of those that are turned; the heads share one such key
    value_size: int
    query_rank: int | None = None  # queries are made from a latent too, unless it is None
    rope: Rope = NEIGHBOURS
    scale: float | None = None  # of scores; None is (nope_size + rope_size) ** -0.5
    bias: bool = False
    norm: NormKind = LATENT_NORM  # of the latents, whatever the model's own

    def __post_init__(self):
        if self.rope_size % 2:
            raise ValueError(f"rope_size {self.rope_size} is odd; rotary embeddings need pairs of dimensions")

    @property
    def window(self) -> int | None:
        return None

    @property
    def turned(self) -> int:
        return self.rope_size

    @property
    def cached(self) -> tuple[tuple[int, int], tuple[int, int] | None]:
        """One row for all heads; values are made from the keys."""
        return (1, self.rank + self.rope_size), None

    @property
    def cached_by(self) -> str | None:
        """None: the row that all heads share is whole on every device."""
        return None

    @property
    def can_share(self) -> bool:
        """False: a prefill makes the keys of each of its rows anew."""
        return False

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


@dataclass(frozen=True)
class Dense:
    """A feed-forward layer of F inner dimensions, gated (Shazeer, arXiv 2002.05202) or plain."""

    size: int  # F
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    clamp: float | None = None  # of clamped_silu
    output_gate: bool = False  # the output is multiplied by the sigmoid of a learned score of the input

    @property
    def inner(self) -> int:
        """Inner dimensions that a token goes through."""
        return self.size

    def met(self, tokens: int) -> float:
        """The share of the layer's weights that `tokens` tokens go through."""
        return 1.0


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: each token goes to the `active` of `count` that its router scores highest.

    Experts may stand in groups of which only `active_groups` are looked at, those with the best expert or,
    for "top2", with the best sum of two (DeepSeek-V2 and -V3, arXiv 2405.04434 and 2412.19437). `correction`
    is added to scores for choosing only.
    """

    count: int  # E
    active: int
    size: int  # F of one expert
    activation: Activation = "silu"
    bias: bool = False
    router_bias: bool = False
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalised: bool = True  # the chosen experts' weights add up to one
    factor: float = 1.0  # of their weights
    correction: bool = False
    groups: int = 1
    active_groups: int = 1
    group_score: Literal["best", "top2"] = "best"
    shared: int = 0  # F of the expert that every token goes to; 0 is none
    shared_gate: bool = False  # an output gate of that expert
    scales: bool = False  # learned ones of the experts' weights
    weighs_inputs: bool = False  # what experts are given is weighted, not what they make (Llama 4)
    # router, experts and shared expert norm the layer's input, and the latter two what they make (Gemma 4)
    norms: NormKind | None = None
    clamp: float | None = None  # of clamped_silu

    @property
    def inner(self) -> int:
        """Inner dimensions that a token goes through."""
        return self.active * self.size + self.shared

    def met(self, tokens: int) -> float:
        """The share of the experts' weights that `tokens` tokens go through on average, if each chooses
        evenly and by itself."""
        return 1.0 - (1.0 - self.active / self.count) ** tokens

    @property
    def each(self) -> Dense:
        """The feed-forward layer that one expert is."""
        return Dense(self.size, self.activation, bias=self.bias, clamp=self.clamp)

    @property
    def everyone(self) -> Dense:
        """The feed-forward layer that the shared expert is."""
        return Dense(self.shared, self.activation, output_gate=self.shared_gate)

    def __post_init__(self):
        if not 0 < self.active <= self.count:
            raise ValueError(f"{self.active} of {self.count} experts cannot be active")
        if self.count % self.groups:
            raise ValueError(f"{self.count} experts are not a multiple of {self.groups} groups")
        if not 0 < self.active_groups <= self.groups:
            raise ValueError(f"{self.active_groups} of {self.groups} groups of experts cannot be active")
        if self.active > self.active_groups * (self.count // self.groups):
            raise ValueError(f"{self.active} active experts are more than {self.active_groups} groups hold")
        if self.group_score == "top2" and self.groups > 1 and self.count // self.groups < 2:
            raise ValueError(f"groups of {self.count // self.groups} experts have no two best ones")


@dataclass(frozen=True)
class LayerKind:
    """One layer: how tokens are mixed, and what is done with each of them."""

    mixer: GroupedQuery | Latent
    ffn: Dense | Experts


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: its sizes, and the kind of each layer. `uniform` makes one whose layers are all alike."""

    vocab_size: int  # V
    hidden_size: int  # D
    layers: tuple[LayerKind, ...]  # L of them
    max_position: int = 2048
    norm: NormKind = NormKind()
    pre_norms: bool = True  # what a layer's parts are given is normed
    post_norms: bool = False  # what they add is normed
    parallel: Literal["one norm", "two norms"] | None = None  # both parts are given the layer's input
    residual_scale: float = 1.0  # of what they add
    tied_embeddings: bool = False
    head_bias: bool = False
    learned_positions: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    layer_scales: bool = False  # a learned one of each layer's output
    layer_input: LayerInput | None = None

    @classmethod
    def uniform(
        cls,
        vocab_size: int,
        hidden_size: int,
        ffn_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        max_position: int = 2048,
        norm_eps: float = 1e-5,
        rope: Rope = ROPE,
        tied_embeddings: bool = False,
        attention_bias: bool = False,
        mlp_bias: bool = False,
    ) -> "ModelConfig":
        """Equal layers of grouped-query attention and a gated feed-forward layer, as in Llama."""
        mixer = GroupedQuery(
            num_heads, num_kv_heads, head_size, rope, bias=attention_bias, output_bias=attention_bias
        )
        layer = LayerKind(mixer, Dense(ffn_size, bias=mlp_bias))
        norm = NormKind(eps=norm_eps)
        return cls(
            vocab_size,
            hidden_size,
            (layer,) * num_layers,
            max_position,
            norm,
            tied_embeddings=tied_embeddings,
        )

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def input_size(self) -> int:
        """Numbers that all layers together are given of a token, beside the stream."""
        return self.layer_input.size * self.num_layers if self.layer_input else 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The layers' different windows, unlimited first: layers of one window keep the same positions."""
        return windows_of(self.layers)

    @property
    def boundary(self) -> int | None:
        """Tokens beyond which all keys of a sequence are others than before (longrope), if there is such a
        length."""
        found = [rope.boundary for layer in self.layers if (rope := layer.mixer.rope) and rope.boundary]
        return min(found, default=None)

    def within(self, length: int) -> "ModelConfig":
        """The same decoder for sequences of at most `length` tokens: windows that are as long say nothing."""

        def layer(kind: LayerKind) -> LayerKind:
            mixer = kind.mixer
            if isinstance(mixer, GroupedQuery) and mixer.window is not None and mixer.window >= length:
                return replace(kind, mixer=replace(mixer, window=None, chunked=False))
            return kind

        return replace(self, layers=tuple(map(layer, self.layers)))


def windows_of(layers: Iterable[LayerKind]) -> tuple[int | None, ...]:
    """The different windows of layers, unlimited first."""
    found = {layer.mixer.window for layer in layers}
    return tuple(sorted(found, key=lambda w: (w is not None, w)))

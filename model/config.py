"""Sizes and layer kinds of a decoder without its weights. Frozen and hashable, so static under jit."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from .kinds import PLAIN_NORM, ROPE, GroupedQuery, Latent, NormKind
from .recurrent.kinds import BLOCK, STATE, DeltaNet, Leaves, Mamba, ShortConv
from .rope import Rope

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_silu"]


@dataclass(frozen=True)
class Dense:
    """A feed-forward layer of F inner dimensions, gated (Shazeer, arXiv 2002.05202) or plain."""

    size: int  # F
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    clamp: float | None = None  # of clamped_silu
    output_gate: bool = False  # the output is multiplied by the sigmoid of a learned score of the input
    gate_scale: float = 1.0  # of what the activation is given
    scale: float = 1.0  # of the output

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


Keyed = GroupedQuery | Latent
Mixer = Keyed | DeltaNet | ShortConv | Mamba


@dataclass(frozen=True)
class LayerInput:
    """Per-layer inputs, made from a token and its embedding, besides the residual stream (Gemma 3n and 4)."""

    size: int  # P, numbers of a layer
    vocab_size: int  # V of their embedding
    activation: Activation = "gelu_tanh"


@dataclass(frozen=True)
class LayerKind:
    """Kind of one layer: its token mixers, and its feed-forward layer or None.

    A mixer caches keys (`cached`) or a recurrent `state`, whose heads are split over devices like those of
    the weight `cached_by`. `can_share` of a mixer with keys: a prompt may be cut into rows that share a call
    with rows of other prompts. A mixer with a state may stand `beside` one with keys: both read the same
    input, and their outputs are added.
    """

    mixer: Mixer
    ffn: Dense | Experts | None
    beside: Mamba | None = None
    scales: tuple[tuple[float, float], ...] = ((1.0, 1.0),) * 2  # of what mixers are given, and make

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return (self.mixer,) if self.beside is None else (self.mixer, self.beside)

    @property
    def keys(self) -> Keyed | None:
        """The mixer that leaves keys."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, Keyed)), None)

    @property
    def state(self) -> Leaves | None:
        """The state of the mixer that has one."""
        return next((mixer.state for mixer in self.mixers if mixer.state), None)

    @property
    def inner(self) -> int:
        """Inner dimensions that a token goes through behind the mixer."""
        return 0 if self.ffn is None else self.ffn.inner


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: its sizes, and the kind of each layer. `uniform` makes one whose layers are all alike."""

    vocab_size: int  # V
    hidden_size: int  # D
    layers: tuple[LayerKind, ...]  # L of them
    max_position: int = 2048
    norm: NormKind = PLAIN_NORM
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
    def block(self) -> int:
        """Alignment of a prefill's chunks, in tokens."""
        return BLOCK if STATE in self.windows else 1

    @property
    def boundary(self) -> int | None:
        """Tokens beyond which all keys of a sequence are others than before (longrope), if there is such a
        length."""
        found = [
            rope.boundary for kind in self.layers if (rope := kind.keys and kind.keys.rope) and rope.boundary
        ]
        return min(found, default=None)

    def within(self, length: int) -> "ModelConfig":
        """The same decoder for sequences of at most `length` tokens: windows and choices that are as long say
        nothing."""

        def layer(kind: LayerKind) -> LayerKind:
            mixer = kind.mixer
            if isinstance(mixer, Latent) and mixer.indexer and (mixer.indexer.keys or 0) >= length:
                return replace(kind, mixer=replace(mixer, indexer=replace(mixer.indexer, keys=None)))
            if isinstance(mixer, GroupedQuery) and mixer.window is not None and mixer.window >= length:
                return replace(kind, mixer=replace(mixer, window=None, chunked=False))
            return kind

        return replace(self, layers=tuple(map(layer, self.layers)))


def windows_of(layers: Iterable[LayerKind]) -> tuple[int | None, ...]:
    """The different windows of layers, unlimited first."""
    found = {mixer.window for layer in layers for mixer in layer.mixers}
    return tuple(sorted(found, key=lambda w: (w is not None, w)))

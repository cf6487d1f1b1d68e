"""Sizes and layer kinds of a decoder, without its weights. Frozen and hashable, so static under jit."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from .embeddings.encoder import Encoder
from .kinds import DEFAULT_ROPE, PLAIN_NORM, GroupedQuery, Latent, NormKind
from .recurrent.kinds import STATE_BLOCK_TOKENS, STATE_WINDOW, DeltaNet, Mamba, ShortConv, StateShapes
from .rope import Rope

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_silu", "xielu"]


@dataclass(frozen=True)
class Dense:
    """A feed-forward layer of F inner dimensions, gated (Shazeer, arXiv 2002.05202) or plain."""

    size: int  # F
    activation: Activation = "silu"
    gated: bool = True
    bias: bool = False
    clamp: float | None = None  # of clamped_silu
    output_gate: bool = False  # the output is multiplied by the sigmoid of a learned score of the input
    gate_scale: float = 1.0  # factor of the activation's input
    scale: float = 1.0  # factor of the output

    @property
    def inner_size(self) -> int:
        """Return the number of inner dimensions that a token goes through."""
        return self.size

    def active_share(self, tokens: int) -> float:
        """Return the share of the layer's weights that `tokens` tokens go through: all."""
        return 1.0


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: each token goes to the `active` of `count` experts with the highest router
    scores.

    Experts may stand in groups. Only the `active_groups` best groups are searched: those with the best expert
    or, for "top2", with the best sum of two (DeepSeek-V2 and -V3, arXiv 2405.04434 and 2412.19437).
    `correction` is added to scores for choosing only.
    """

    count: int  # E
    active: int
    size: int  # F of one expert
    activation: Activation = "silu"
    bias: bool = False
    router_bias: bool = False
    scoring: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    jitter: float = 0.01  # of sparsemixer: half of the relative distance within which logits count
    router_softcap: float | None = None  # logits are softcap * tanh(logits / softcap)
    normalised: bool = True  # the chosen experts' weights add up to one
    factor: float = 1.0  # of the chosen experts' weights
    correction: bool = False
    corrects_logits: bool = False  # the correction is added to logits (Kolibri), not to scores
    groups: int = 1
    active_groups: int = 1
    group_score: Literal["best", "top2"] = "best"
    shared: int = 0  # F of the shared expert, which every token goes to; 0: none
    shared_gate: bool = False  # the shared expert has an output gate
    shared_scale: float = 1.0  # factor of the shared expert's output
    scales: bool = False  # each expert's weight has a learned scale
    weighs_inputs: bool = False  # weights multiply the experts' inputs, not their outputs (Llama 4)
    # of the inputs of router, experts and shared expert, and of the outputs of the latter two (Gemma 4)
    norms: NormKind | None = None
    output_norm: NormKind | None = None  # of the sum of all outputs
    clamp: float | None = None  # of clamped_silu
    gated: bool = True  # the experts, and the shared expert

    @property
    def inner_size(self) -> int:
        """Return the number of inner dimensions that a token goes through."""
        return self.active * self.size + self.shared

    def active_share(self, tokens: int) -> float:
        """Return the expected share of the experts' weights that `tokens` tokens go through, if choices are
        uniform."""
        return 1.0 - (1.0 - self.active / self.count) ** tokens

    @property
    def expert_ffn(self) -> Dense:
        """Return the feed-forward layer of one expert."""
        return Dense(self.size, self.activation, self.gated, self.bias, self.clamp)

    @property
    def shared_ffn(self) -> Dense:
        """Return the feed-forward layer of the shared expert."""
        return Dense(
            self.shared,
            self.activation,
            self.gated,
            output_gate=self.shared_gate,
            scale=self.shared_scale,
        )

    def __post_init__(self):
        if self.scoring == "sparsemixer" and self.active != 2:
            raise ValueError(f"{self.active} active experts, expected the 2 that a sparsemixer chooses")
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


AttentionMixer = GroupedQuery | Latent
Mixer = AttentionMixer | DeltaNet | ShortConv | Mamba


@dataclass(frozen=True)
class LayerInput:
    """Per-layer inputs, made from a token and its embedding, besides the residual stream (Gemma 3n and 4)."""

    size: int  # P, numbers of a layer
    vocab_size: int  # V of their embedding
    activation: Activation = "gelu_tanh"
    pad_token_id: int = 0  # token that is looked up where an encoder's embedding is in a token's place


@dataclass(frozen=True)
class LayerKind:
    """Kind of one layer: its token mixers, and its feed-forward layer or None.

    A mixer caches keys (`cache_shapes`) or a recurrent state (`state_shapes`). Their heads are split over
    devices like those of the weight named by `cache_sharding_weight`. If a mixer of keys `can_share`, a
    prompt may be cut into rows that share a call with rows of other prompts. A mixer with a state may stand
    beside one with keys, as `parallel_mixer`: both read the same input, and their outputs are added.
    """

    mixer: Mixer
    ffn: Dense | Experts | None
    parallel_mixer: Mamba | None = None
    scales: tuple[tuple[float, float], ...] = ((1.0, 1.0),) * 2  # factors of each mixer's input and output

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """Return the layer's token mixers, the main one first."""
        return (self.mixer,) if self.parallel_mixer is None else (self.mixer, self.parallel_mixer)

    @property
    def attention(self) -> AttentionMixer | None:
        """Return the mixer that caches keys, or None."""
        return next((mixer for mixer in self.mixers if isinstance(mixer, AttentionMixer)), None)

    @property
    def state_shapes(self) -> StateShapes | None:
        """Return the shapes of the layer's recurrent state, or None."""
        return next((mixer.state_shapes for mixer in self.mixers if mixer.state_shapes), None)

    @property
    def inner_size(self) -> int:
        """Return the number of inner dimensions that a token goes through after the mixers."""
        return 0 if self.ffn is None else self.ffn.inner_size


@dataclass(frozen=True)
class ModelConfig:
    """A decoder: its sizes, and the kind of each layer. `uniform` makes one whose layers are all equal."""

    vocab_size: int  # V
    hidden_size: int  # D
    layers: tuple[LayerKind, ...]  # L of them
    max_position: int = 2048
    norm: NormKind = PLAIN_NORM
    pre_norms: bool = True  # the inputs of a layer's sublayers are normed
    post_norms: bool = False  # their outputs are normed
    parallel: Literal["one norm", "two norms"] | None = None  # both sublayers read the layer's input
    residual_scale: float = 1.0  # factor of the sublayers' outputs
    tied_embeddings: bool = False
    has_head: bool = True  # False: no output matrix, the decoder makes embeddings
    head_bias: bool = False
    learned_positions: bool = False
    position_offset: int = 0  # row of the first position among the learned ones
    embedding_scale: float = 1.0
    embedding_norm: bool = False  # embeddings are normed
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    layer_scales: bool = False  # each layer's output has a learned scale
    layer_input: LayerInput | None = None
    encoder: Encoder | None = None  # makes embeddings of content that is not text

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
        rope: Rope = DEFAULT_ROPE,
        tied_embeddings: bool = False,
        attention_bias: bool = False,
        mlp_bias: bool = False,
        qk_norm: bool = False,
        attention_scale: float | None = None,
    ) -> "ModelConfig":
        """Return a config of equal layers of grouped-query attention and a gated feed-forward layer, as in
        Llama, or with `qk_norm`, norms of each head's queries and keys, as in Qwen 3.

        attention_scale: factor of scores; None is `head_size ** -0.5`.
        """
        norm, bias = NormKind(eps=norm_eps), attention_bias
        head_norm = norm if qk_norm else None
        mixer = GroupedQuery(
            num_heads, num_kv_heads, head_size, rope,
            scale=attention_scale, bias=bias, output_bias=bias, qk_norm=head_norm,
        )  # fmt: skip
        layer = LayerKind(mixer, Dense(ffn_size, bias=mlp_bias))
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
    def layer_input_size(self) -> int:
        """Return the size of a token's per-layer inputs, all layers together."""
        return self.layer_input.size * self.num_layers if self.layer_input else 0

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Return the layers' different windows, unlimited first. Layers of one window keep the same
        positions."""
        return distinct_windows(self.layers)

    @property
    def prefill_alignment(self) -> int:
        """Return the alignment of a prefill's chunks, in tokens."""
        return STATE_BLOCK_TOKENS if STATE_WINDOW in self.windows else 1

    @property
    def longrope_boundary(self) -> int | None:
        """Return the sequence length, in tokens, beyond which longrope changes all keys. None if there is
        none."""
        boundaries = [
            rope.longrope_boundary
            for kind in self.layers
            if (rope := kind.attention and kind.attention.rope) and rope.longrope_boundary
        ]
        return min(boundaries, default=None)

    def drop_unreached_limits(self, length: int) -> "ModelConfig":
        """Drop sliding windows and sparse-attention limits that cannot take effect within `length` tokens."""

        def drop_limits(kind: LayerKind) -> LayerKind:
            mixer = kind.mixer
            if isinstance(mixer, Latent) and mixer.indexer and (mixer.indexer.top_k or 0) >= length:
                return replace(kind, mixer=replace(mixer, indexer=replace(mixer.indexer, top_k=None)))
            if isinstance(mixer, GroupedQuery) and mixer.window is not None and mixer.window >= length:
                return replace(kind, mixer=replace(mixer, window=None, chunked=False))
            return kind

        return replace(self, layers=tuple(map(drop_limits, self.layers)))


def distinct_windows(layers: Iterable[LayerKind]) -> tuple[int | None, ...]:
    """Return the different windows of layers, unlimited first."""
    windows = {mixer.window for layer in layers for mixer in layer.mixers}
    return tuple(sorted(windows, key=lambda w: (w is not None, w)))

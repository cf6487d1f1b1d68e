"""The decoder: a tree of parameters and its forward pass. It knows no caches, batches or meshes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .attention import Attend, Attention, attention_spec, mix_heads
from .config import Dense, Experts, GroupedQuery, Latent, LayerKind, Mixer, ModelConfig
from .experts import MoE, chosen_experts, experts_spec, mix_experts
from .ffn import FFN, feed_forward, ffn_spec
from .inputs import PerLayerEmbedding, PerLayerGate, input_spec, inputs_of, inputs_spec, with_input
from .latent import LatentAttention, latent_spec, mix_latent
from .layers import Norm, NormWeight, biased, einsum, norm_spec, normalise, scaled, softcapped
from .recurrent.convolution import ShortConvolution, convolution_spec, mix_convolution
from .recurrent.delta import DeltaAttention, delta_spec, mix_delta
from .recurrent.kinds import DeltaNet, Mamba, ShortConv
from .recurrent.mamba import MambaMixer, mamba_spec, mix_mamba
from .rope import Rotation, beyond, rotation
from .tree import Spec, pytree

# how a layer's parts are made and computed, by their kind
SUBLAYERS: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {
    GroupedQuery: (attention_spec, mix_heads),
    Latent: (latent_spec, mix_latent),
    DeltaNet: (delta_spec, mix_delta),
    ShortConv: (convolution_spec, mix_convolution),
    Mamba: (mamba_spec, mix_mamba),
    Dense: (ffn_spec, feed_forward),
    Experts: (experts_spec, mix_experts),
}


@pytree
class Layer:
    """Parameters of a layer; a norm that the family does not have is None. A layer with keys and a state has
    both `attention` and `recurrent`."""

    attention_norm: Norm | NormWeight | None
    attention: Attention | LatentAttention | None  # of a layer that keeps keys
    ffn_norm: Norm | NormWeight | None
    ffn: FFN | MoE | None
    attention_post_norm: Norm | NormWeight | None = None
    ffn_post_norm: Norm | NormWeight | None = None
    recurrent: DeltaAttention | ShortConvolution | MambaMixer | None = None  # of one that keeps a state
    input: PerLayerGate | None = None
    scale: Any = None  # [1], of what comes out

    def of(self, mixer: Mixer) -> Any:
        """A mixer's parameters."""
        return self.attention if mixer.state is None else self.recurrent

    @property
    def any_norm(self) -> Norm | NormWeight:
        """A norm of the layer; all are replicated on its devices."""
        return next(norm for norm in (self.attention_norm, self.attention_post_norm) if norm is not None)


@pytree
class Decoder:
    """All parameters. `head` is None where the embedding is tied to the output, `head_bias` is added to
    logits."""

    embed: Any  # [V,D]
    layers: tuple[Layer, ...]
    norm: Any  # Norm; what a stage of a pipeline does not have is None
    head: Any = None  # [V,D]
    positions: Any = None  # [max_position,D], where they are learned
    head_bias: Any = None  # [V]
    inputs: PerLayerEmbedding | None = None


def layer_spec(kind: LayerKind, c: ModelConfig) -> Layer:
    D, depth, norm = c.hidden_size, c.num_layers, norm_spec(c.norm, c.hidden_size)
    pre, post = norm if c.pre_norms else None, norm if c.post_norms else None
    own = {mixer.state is None: SUBLAYERS[type(mixer)][0](mixer, D, depth) for mixer in kind.mixers}
    keys, state = own.get(True), own.get(False)
    if kind.ffn is None:
        return Layer(pre, keys, None, None, post, None, state)
    is_normed = isinstance(kind.ffn, Experts) and kind.ffn.norms is not None
    second = None if c.parallel == "one norm" or is_normed else pre
    scale = Spec((1,), ("one",), mean=1.0, scale=0.0) if c.layer_scales else None
    ffn = SUBLAYERS[type(kind.ffn)][0](kind.ffn, D, depth)
    return Layer(pre, keys, second, ffn, post, post, state, input_spec(c), scale)


def decoder_spec(c: ModelConfig) -> Decoder:
    """Every parameter of a decoder, before it has numbers."""
    V, D = c.vocab_size, c.hidden_size
    specs = {kind: layer_spec(kind, c) for kind in set(c.layers)}
    return Decoder(
        embed=Spec((V, D), ("vocab", "model")),
        layers=tuple(specs[kind] for kind in c.layers),
        norm=norm_spec(c.norm, D),
        head=None if c.tied_embeddings else Spec((V, D), ("vocab", "model")),
        positions=Spec((c.max_position, D), ("position", "model")) if c.learned_positions else None,
        head_bias=Spec((V,), ("vocab",), scale=0.0) if c.head_bias else None,
        inputs=inputs_spec(c),
    )


@dataclass(frozen=True)
class Observe:
    """Which inner values a step reports of each token. experts: the experts chosen in every layer that has
    some. layers: numbers of layers after which hidden states are reported, 0 for the embedding."""

    experts: bool = False
    layers: tuple[int, ...] = ()


@pytree
class Observed:
    """Inner values of a step's tokens. experts: int32 [B,T,layers with experts,A], best first. hidden:
    float32 [B,T,layers,D]. None if not observed."""

    experts: Any = None
    hidden: Any = None


class Recorder:
    """Collects the values of one forward pass while it is traced."""

    def __init__(self, observe: Observe):
        self._observe = observe
        self._experts: list[Int[Array, "B T A"]] = []
        self._hidden: dict[int, Float[Array, "B T D"]] = {}

    def after_layers(self, n: int, x: Float[Array, "B T D"]) -> None:
        """Take the hidden states after the first n layers."""
        if n in self._observe.layers:
            self._hidden[n] = x.astype(jnp.float32)

    def route(self, w: Any, kind: LayerKind, x: Float[Array, "B T D"]) -> None:
        """Take the experts that a layer chooses for its feed-forward layer's input."""
        if self._observe.experts and isinstance(kind.ffn, Experts):
            self._experts.append(chosen_experts(w, kind.ffn, x))

    def observed(self) -> Observed:
        hidden = [self._hidden[n] for n in self._observe.layers]
        return Observed(*(jnp.stack(found, 2) if found else None for found in (self._experts, hidden)))


@jax.named_scope("embed")
def embed(
    params: Decoder, c: ModelConfig, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    x = scaled(rows_of(params.embed, tokens), c.embedding_scale)
    return x if params.positions is None else x + params.positions[positions]


def rows_of(matrix: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Rows of an embedding. On a CPU a barrier ties a 16-bit matrix to the step's tokens: XLA would widen all
    of it before a loop of several steps."""

    def plainly(matrix: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return matrix[tokens]

    def late(matrix: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return plainly(*jax.lax.optimization_barrier((matrix, tokens)))

    if not isinstance(matrix, jax.Array) or matrix.dtype.itemsize != 2:
        return plainly(matrix, tokens)
    return jax.lax.platform_dependent(matrix, tokens, cpu=late, default=plainly)


@jax.named_scope("rotary")
def turns(c: ModelConfig, positions: Int[Array, "B T"], lengths: Int[Array, " B"]) -> list[Rotation | None]:
    """Each layer's rotary embedding; layers of one kind share it."""
    found: dict[Any, Rotation | None] = {}

    def of_kind(kind: LayerKind) -> Rotation | None:
        if kind.keys is None or (rope := kind.keys.rope) is None:
            return None
        size = kind.keys.turned
        if (rope, size) not in found:
            found[rope, size] = rotation(positions, rope, size, beyond(rope, lengths))
        return found[rope, size]

    return [of_kind(kind) for kind in c.layers]


def layer(
    w: Layer,
    kind: LayerKind,
    c: ModelConfig,
    x: Float[Array, "B T D"],
    rotary: Rotation | None,
    attend: Attend,
    state: Any,
    i: int,
    layer_input: Float[Array, "B T P"] | None = None,
    recorder: Recorder | None = None,
) -> tuple[Float[Array, "B T D"], Any]:
    """x + mix(norm(x)), then x + ffn(norm(x)); returns x and attend's state after layer i.

    `layer_input`: the layer's own input (Gemma 3n and 4), or None.
    """
    inner = normed(c, x, w.attention_norm)
    state, mixed = mix(w, kind, inner, rotary, attend, state, i)
    outer = added(c, x, mixed, w.attention_post_norm)
    if kind.ffn is None:
        return outer, state
    inner = ffn_input(w, c, x, inner, outer)
    if recorder is not None:
        recorder.route(w.ffn, kind, inner)
    made = ffn_half(w.ffn, kind, inner)
    return after_ffn(w, c, outer, made, layer_input), state


def mix(
    w: Layer,
    kind: LayerKind,
    x: Float[Array, "B T D"],
    rotary: Rotation | None,
    attend: Attend,
    state: Any,
    i: int,
) -> tuple[Any, Float[Array, "B T D"]]:
    """Attend's state after the mixers of layer i, and the sum of their outputs for normed x."""
    made = []
    for mixer, (scale_in, scale_out) in zip(kind.mixers, kind.scales, strict=False):
        mixing = SUBLAYERS[type(mixer)][1]
        turn = rotary if mixer is kind.keys else None
        with jax.named_scope("attention" if mixer.state is None else "recurrent"):
            state, out = mixing(w.of(mixer), mixer, scaled(x, scale_in), turn, attend, state, i)
            made.append(scaled(out, scale_out))
    return state, sum(made[1:], made[0])


def ffn_input(
    w: Layer,
    c: ModelConfig,
    x: Float[Array, "B T D"],
    inner: Float[Array, "B T D"],
    outer: Float[Array, "B T D"],
) -> Float[Array, "B T D"]:
    """The feed-forward layer's input: from `outer`, x after the mixers, or in parallel to them from x, whose
    norm may be `inner`, the mixers' own."""
    if c.parallel is None:
        return normed(c, outer, w.ffn_norm)
    return inner if w.ffn_norm is None else normed(c, x, w.ffn_norm)


def ffn_half(w: Any, kind: LayerKind, inner: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """The feed-forward layer, which mixes no tokens and keeps no state."""
    with jax.named_scope("experts" if isinstance(kind.ffn, Experts) else "ffn"):
        return SUBLAYERS[type(kind.ffn)][1](w, kind.ffn, inner)


def after_ffn(
    w: Layer,
    c: ModelConfig,
    outer: Float[Array, "B T D"],
    made: Float[Array, "B T D"],
    layer_input: Float[Array, "B T P"] | None = None,
) -> Float[Array, "B T D"]:
    """x after a layer whose feed-forward layer's output is `made`."""
    out = added(c, outer, made, w.ffn_post_norm)
    if w.input is not None:
        out = with_input(w.input, c, out, layer_input)
    return out if w.scale is None else out * w.scale[None, None]


def attention_half(
    w: Layer,
    kind: LayerKind,
    c: ModelConfig,
    x: Float[Array, "B T D"],
    rotary: Rotation | None,
    attend: Attend,
    state: Any,
    i: int,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], Any]:
    """`layer` up to its feed-forward layer, where that lies on other devices: x after the mixers, the
    feed-forward layer's input, and attend's state."""
    inner = normed(c, x, w.attention_norm)
    state, mixed = mix(w, kind, inner, rotary, attend, state, i)
    outer = added(c, x, mixed, w.attention_post_norm)
    return outer, ffn_input(w, c, x, inner, outer), state


@jax.named_scope("norm")
def normed(c: ModelConfig, x: Float[Array, "B T D"], norm: Norm | NormWeight | None) -> Float[Array, "B T D"]:
    return x if norm is None else normalise(x, norm, c.norm)


def added(
    c: ModelConfig, x: Float[Array, "B T D"], y: Float[Array, "B T D"], post: Norm | NormWeight | None
) -> Float[Array, "B T D"]:
    return x + scaled(normed(c, y, post), c.residual_scale)


def forward(
    params: Decoder,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: Attend,
    state: Any = None,
    lengths: Int[Array, " B"] | None = None,
    recorder: Recorder | None = None,
) -> tuple[Float[Array, "B T D"], Any]:
    """Hidden states after the last norm, and attend's new state. Layers are unrolled: a scan would copy their
    weights.

    `lengths`: tokens of each row's whole sequence, by which longrope chooses its frequencies; by default the
    last position + 1.
    """
    lengths = positions[:, -1] + 1 if lengths is None else lengths
    x = embed(params, config, tokens, positions)
    inputs = inputs_of(params.inputs, config, tokens, x)
    x, state = through(params.layers, config, x, positions, lengths, attend, state, inputs, recorder)
    return normed(config, x, params.norm), state


def through(
    layers: Sequence[Layer],
    config: ModelConfig,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    attend: Attend,
    state: Any,
    inputs: Sequence[Float[Array, "B T P"] | None] | None = None,
    recorder: Recorder | None = None,
) -> tuple[Float[Array, "B T D"], Any]:
    """x and attend's state after consecutive layers, all that `config` has; `inputs`: of each layer its own,
    if any."""
    inputs = [None] * len(layers) if inputs is None else inputs
    for i, rotary in enumerate(turns(config, positions, lengths)):
        if recorder is not None:
            recorder.after_layers(i, x)
        x, state = layer(
            layers[i], config.layers[i], config, x, rotary, attend, state, i, inputs[i], recorder
        )
    if recorder is not None:
        recorder.after_layers(len(layers), x)
    return x, state


@jax.named_scope("unembed")
def unembed(params: Decoder, config: ModelConfig, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
    """Logits in float32."""
    head = params.embed if params.head is None else params.head
    logits = scaled(einsum("...d,vd->...v", hidden, head, jnp.float32), config.logit_scale)
    bias = None if params.head_bias is None else params.head_bias.astype(jnp.float32)
    return softcapped(biased(logits, bias), config.logit_softcap)

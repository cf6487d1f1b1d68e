"""The decoder: a tree of parameters and its forward pass. It knows no caches, batches or meshes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .attention import Attend, Attention, attention_spec, run_attention
from .config import Dense, Experts, GroupedQuery, Latent, LayerKind, Mixer, ModelConfig
from .embeddings.encoder import InputEmbeddings, insert_embeddings
from .embeddings.per_layer_embeddings import (
    PerLayerEmbedding,
    PerLayerGate,
    add_layer_input,
    compute_layer_inputs,
    per_layer_embedding_spec,
    per_layer_gate_spec,
)
from .experts import MoE, chosen_expert_ids, experts_spec, run_moe
from .ffn import FFN, feed_forward, ffn_spec
from .latent import LatentAttention, latent_spec, run_latent_attention
from .layers import (
    Norm,
    NormWeight,
    add_bias,
    apply_scale,
    apply_softcap,
    einsum,
    norm_spec,
    normalise,
    prevent_fma,
)
from .recurrent.convolution import ShortConvolution, convolution_spec, run_short_conv
from .recurrent.delta import DeltaAttention, delta_spec, run_delta_net
from .recurrent.kinds import DeltaNet, Mamba, ShortConv
from .recurrent.mamba import MambaMixer, mamba_spec, run_mamba
from .rope import RotaryFactors, rotary_factors, rows_past_boundary
from .tree import Spec, pytree

# functions that make the specs of a sublayer and compute it, by its kind
SUBLAYERS: dict[type, tuple[Callable[..., Any], Callable[..., Any]]] = {
    GroupedQuery: (attention_spec, run_attention),
    Latent: (latent_spec, run_latent_attention),
    DeltaNet: (delta_spec, run_delta_net),
    ShortConv: (convolution_spec, run_short_conv),
    Mamba: (mamba_spec, run_mamba),
    Dense: (ffn_spec, feed_forward),
    Experts: (experts_spec, run_moe),
}


@pytree
class Layer:
    """Parameters of a layer. A norm that the family does not have is None.

    A layer with keys and a state has both `attention` and `recurrent`.
    """

    attention_norm: Norm | NormWeight | None
    attention: Attention | LatentAttention | None  # of a layer with keys
    ffn_norm: Norm | NormWeight | None
    ffn: FFN | MoE | None
    attention_post_norm: Norm | NormWeight | None = None
    ffn_post_norm: Norm | NormWeight | None = None
    recurrent: DeltaAttention | ShortConvolution | MambaMixer | None = None  # of a layer with a state
    input: PerLayerGate | None = None
    scale: Any = None  # [1], factor of the layer's output

    def mixer_params(self, mixer: Mixer) -> Any:
        """Return a mixer's parameters."""
        return self.attention if mixer.state_shapes is None else self.recurrent

    @property
    def any_mixer_leaf(self) -> Any:
        """Return an array of a mixer. It is on the devices of the mixers and of all norms."""
        return jax.tree.leaves((self.attention, self.recurrent))[0]


@pytree
class Decoder:
    """All parameters of a decoder.

    `head` is None if the embedding is also the output matrix, or if there is none. `head_bias` is added to
    logits.
    """

    embed: Any  # [V,D]
    layers: tuple[Layer, ...]
    norm: Any  # Norm; a pipeline stage has None for what is on another stage
    head: Any = None  # [V,D]
    positions: Any = None  # [position_offset+max_position,D], if positions are learned
    head_bias: Any = None  # [V]
    inputs: PerLayerEmbedding | None = None
    embed_norm: Norm | NormWeight | None = None
    encoder: Any = None  # parameters of `ModelConfig.encoder`


def layer_spec(kind: LayerKind, c: ModelConfig) -> Layer:
    """Return the specs of one layer."""
    D, depth, norm = c.hidden_size, c.num_layers, norm_spec(c.norm, c.hidden_size)
    pre, post = norm if c.pre_norms else None, norm if c.post_norms else None
    specs = {mixer.state_shapes is None: SUBLAYERS[type(mixer)][0](mixer, D, depth) for mixer in kind.mixers}
    keys, state = specs.get(True), specs.get(False)
    if kind.ffn is None:
        return Layer(pre, keys, None, None, post, None, state)
    is_normed = isinstance(kind.ffn, Experts) and kind.ffn.norms is not None
    second = None if c.parallel == "one norm" or is_normed else pre
    scale = Spec((1,), ("one",), mean=1.0, scale=0.0) if c.layer_scales else None
    ffn = SUBLAYERS[type(kind.ffn)][0](kind.ffn, D, depth)
    return Layer(pre, keys, second, ffn, post, post, state, per_layer_gate_spec(c), scale)


def decoder_spec(c: ModelConfig) -> Decoder:
    """Return the specs of every parameter of a decoder."""
    V, D = c.vocab_size, c.hidden_size
    specs = {kind: layer_spec(kind, c) for kind in set(c.layers)}
    return Decoder(
        embed=Spec((V, D), ("vocab", "model")),
        layers=tuple(specs[kind] for kind in c.layers),
        norm=norm_spec(c.norm, D),
        head=Spec((V, D), ("vocab", "model")) if c.has_head and not c.tied_embeddings else None,
        positions=position_spec(c),
        head_bias=Spec((V,), ("vocab",), scale=0.0) if c.has_head and c.head_bias else None,
        inputs=per_layer_embedding_spec(c),
        embed_norm=norm_spec(c.norm, D) if c.embedding_norm else None,
        encoder=None if c.encoder is None else c.encoder.spec(),
    )


def position_spec(c: ModelConfig) -> Spec | None:
    """Return the spec of learned positions, if there are any."""
    shape = c.max_position + c.position_offset, c.hidden_size
    return Spec(shape, ("position", "model")) if c.learned_positions else None


@dataclass(frozen=True)
class ObserveOptions:
    """Selection of the inner values that a step reports of each token.

    experts: True to report the chosen experts of every layer that has experts.
    layers: numbers of layers after which hidden states are reported, 0 for the embedding.
    """

    experts: bool = False
    layers: tuple[int, ...] = ()


@pytree
class Observed:
    """Inner values of a step's tokens, None if not observed.

    experts: int32 [B,T,layers with experts,A], best first.
    hidden: float32 [B,T,layers,D].
    """

    experts: Any = None
    hidden: Any = None


class Recorder:
    """Collector of the observed values of one forward pass while it is traced."""

    def __init__(self, observe: ObserveOptions):
        self._observe = observe
        self._experts: list[Int[Array, "B T A"]] = []
        self._hidden: dict[int, Float[Array, "B T D"]] = {}

    def record_hidden(self, n: int, x: Float[Array, "B T D"]) -> None:
        """Record the hidden states after the first n layers."""
        if n in self._observe.layers:
            self._hidden[n] = x.astype(jnp.float32)

    def record_experts(self, w: Any, kind: LayerKind, x: Float[Array, "B T D"]) -> None:
        """Record the experts that a layer chooses for its feed-forward layer's input."""
        if self._observe.experts and isinstance(kind.ffn, Experts):
            self._experts.append(chosen_expert_ids(w, kind.ffn, x))

    def collect(self) -> Observed:
        """Return the recorded values."""
        hidden = [self._hidden[n] for n in self._observe.layers]
        return Observed(*(jnp.stack(values, 2) if values else None for values in (self._experts, hidden)))


NULL_RECORDER = Recorder(ObserveOptions())  # records nothing


@jax.named_scope("embed_tokens")
def embed_tokens(
    params: Decoder,
    c: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    embeddings: InputEmbeddings | None = None,
) -> Float[Array, "B T D"]:
    """Return the embeddings of tokens, or those in their place, normed and with learned positions."""
    x = apply_scale(lookup_embedding(params.embed, tokens), c.embedding_scale)
    x = apply_norm(c, insert_embeddings(x, embeddings), params.embed_norm)
    if params.positions is None:
        return x
    rows = positions + c.position_offset if c.position_offset else positions
    return x + params.positions[rows]


def lookup_embedding(matrix: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """Look up the embeddings of tokens.

    On a CPU an optimization barrier ties a 16-bit matrix to the step's tokens. Otherwise XLA would widen the
    whole matrix before a loop of several steps.
    """

    def lookup(matrix: Any, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return matrix[tokens]

    def lookup_after_barrier(matrix: Float[Array, "V D"], tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        return lookup(*jax.lax.optimization_barrier((matrix, tokens)))

    if not isinstance(matrix, jax.Array) or matrix.dtype.itemsize != 2:
        return lookup(matrix, tokens)
    return jax.lax.platform_dependent(matrix, tokens, cpu=lookup_after_barrier, default=lookup)


@jax.named_scope("rotary")
def rotary_by_layer(
    c: ModelConfig, positions: Int[Array, "B T"], lengths: Int[Array, " B"]
) -> list[RotaryFactors | None]:
    """Return the rotary embedding of each layer, or None. Layers of one kind share it."""
    rotary_by_rope: dict[Any, RotaryFactors | None] = {}

    def find_rotary(kind: LayerKind) -> RotaryFactors | None:
        if kind.attention is None or (rope := kind.attention.rope) is None:
            return None
        size = kind.attention.rotary_dims
        if (rope, size) not in rotary_by_rope:
            rotary_by_rope[rope, size] = rotary_factors(
                positions, rope, size, rows_past_boundary(rope, lengths)
            )
        return rotary_by_rope[rope, size]

    return [find_rotary(kind) for kind in c.layers]


def run_layer(
    w: Layer,
    kind: LayerKind,
    c: ModelConfig,
    x: Float[Array, "B T D"],
    rotary: RotaryFactors | None,
    attend: Attend,
    state: Any,
    i: int,
    layer_input: Float[Array, "B T P"] | None = None,
    recorder: Recorder = NULL_RECORDER,
) -> tuple[Float[Array, "B T D"], Any]:
    """Run layer i: h = x + mix(norm(x)), y = h + ffn(norm(h)); in a parallel layer y = h + ffn(norm(x)).

    Returns y, and attend's new state.

    `layer_input`: the layer's own input (Gemma 3n and 4), or None.
    """
    h, ffn_input, state = run_attention_sublayer(w, kind, c, x, rotary, attend, state, i)
    if kind.ffn is None:
        return h, state
    recorder.record_experts(w.ffn, kind, ffn_input)
    return add_ffn_residual(w, c, h, run_ffn(w.ffn, kind, ffn_input), layer_input), state


def run_attention_sublayer(
    w: Layer,
    kind: LayerKind,
    c: ModelConfig,
    x: Float[Array, "B T D"],
    rotary: RotaryFactors | None,
    attend: Attend,
    state: Any,
    i: int,
) -> tuple[Float[Array, "B T D"], Float[Array, "B T D"], Any]:
    """Run layer i up to its feed-forward layer, which may be on other devices: h = x + mix(norm(x)).

    Returns h, the feed-forward layer's input, and attend's new state. The input is norm(h); in a parallel
    layer it is norm(x), whose norm may be the mixers' own.
    """
    normed = apply_norm(c, x, w.attention_norm)
    state, mixed = run_mixers(w, kind, normed, rotary, attend, state, i)
    h = add_residual(c, x, mixed, w.attention_post_norm)
    if c.parallel is None:
        return h, apply_norm(c, h, w.ffn_norm), state
    return h, normed if w.ffn_norm is None else apply_norm(c, x, w.ffn_norm), state


def run_ffn(w: Any, kind: LayerKind, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Run the feed-forward layer on normed x. It mixes no tokens and keeps no state."""
    with jax.named_scope("experts" if isinstance(kind.ffn, Experts) else "ffn"):
        return SUBLAYERS[type(kind.ffn)][1](w, kind.ffn, x)


def add_ffn_residual(
    w: Layer,
    c: ModelConfig,
    h: Float[Array, "B T D"],
    ffn_output: Float[Array, "B T D"],
    layer_input: Float[Array, "B T P"] | None = None,
) -> Float[Array, "B T D"]:
    """Add the feed-forward layer's output to the residual stream h, and finish the layer."""
    x = add_residual(c, h, ffn_output, w.ffn_post_norm)
    if w.input is not None:
        x = add_layer_input(w.input, c, x, layer_input)
    return x if w.scale is None else prevent_fma(x * w.scale[None, None])


def run_mixers(
    w: Layer,
    kind: LayerKind,
    x: Float[Array, "B T D"],
    rotary: RotaryFactors | None,
    attend: Attend,
    state: Any,
    i: int,
) -> tuple[Any, Float[Array, "B T D"]]:
    """Run layer i's mixers on normed x. Returns attend's new state, and the sum of their outputs."""
    outputs = []
    for mixer, (scale_in, scale_out) in zip(kind.mixers, kind.scales, strict=False):
        run_mixer = SUBLAYERS[type(mixer)][1]
        mixer_rotary = rotary if mixer is kind.attention else None
        with jax.named_scope("attention" if mixer.state_shapes is None else "recurrent"):
            state, out = run_mixer(
                w.mixer_params(mixer), mixer, apply_scale(x, scale_in), mixer_rotary, attend, state, i
            )
            outputs.append(apply_scale(out, scale_out))
    return state, sum(outputs[1:], outputs[0])


@jax.named_scope("norm")
def apply_norm(
    c: ModelConfig, x: Float[Array, "B T D"], norm: Norm | NormWeight | None
) -> Float[Array, "B T D"]:
    """Normalise x, if there is a norm."""
    return x if norm is None else normalise(x, norm, c.norm)


def add_residual(
    c: ModelConfig, x: Float[Array, "B T D"], y: Float[Array, "B T D"], post: Norm | NormWeight | None
) -> Float[Array, "B T D"]:
    """Add a sublayer's output to the residual stream, after its post-norm and scale."""
    return x + apply_scale(apply_norm(c, y, post), c.residual_scale)


def forward(
    params: Decoder,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: Attend,
    state: Any = None,
    lengths: Int[Array, " B"] | None = None,
    recorder: Recorder = NULL_RECORDER,
    embeddings: InputEmbeddings | None = None,
) -> tuple[Float[Array, "B T D"], Any]:
    """Return hidden states after the last norm, and attend's new state. Layers are unrolled: a scan would
    copy their weights.

    `lengths`: tokens of each row's whole sequence, by which longrope chooses its frequencies. Default: the
    last position + 1.

    `embeddings`: embeddings in place of tokens' own, if any.
    """
    lengths = positions[:, -1] + 1 if lengths is None else lengths
    x = embed_tokens(params, config, tokens, positions, embeddings)
    inputs = compute_layer_inputs(params.inputs, config, tokens, x, embeddings)
    x, state = run_layers(params.layers, config, x, positions, lengths, attend, state, inputs, recorder)
    return apply_norm(config, x, params.norm), state


def run_layers(
    layers: Sequence[Layer],
    config: ModelConfig,
    x: Float[Array, "B T D"],
    positions: Int[Array, "B T"],
    lengths: Int[Array, " B"],
    attend: Attend,
    state: Any,
    inputs: Sequence[Float[Array, "B T P"] | None] | None = None,
    recorder: Recorder = NULL_RECORDER,
) -> tuple[Float[Array, "B T D"], Any]:
    """Run consecutive layers, all that `config` has. Returns x and attend's state.

    `inputs`: each layer's own input, if any.
    """
    inputs = [None] * len(layers) if inputs is None else inputs
    for i, rotary in enumerate(rotary_by_layer(config, positions, lengths)):
        recorder.record_hidden(i, x)
        x, state = run_layer(
            layers[i], config.layers[i], config, x, rotary, attend, state, i, inputs[i], recorder
        )
    recorder.record_hidden(len(layers), x)
    return x, state


@jax.named_scope("compute_logits")
def compute_logits(
    params: Decoder, config: ModelConfig, hidden: Float[Array, "*rows D"]
) -> Float[Array, "*rows V"]:
    """Compute logits in float32."""
    return finish_logits(config, multiply_head(params, hidden), params.head_bias)


def multiply_head(params: Decoder, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
    """Multiply hidden states by the output matrix, in float32."""
    head = params.embed if params.head is None else params.head
    return einsum("...d,vd->...v", hidden, head, jnp.float32)


def finish_logits(
    config: ModelConfig, products: Float[Array, "*rows V"], bias: Float[Array, " V"] | None
) -> Float[Array, "*rows V"]:
    """Scale products with the output matrix, add the bias, and cap them."""
    bias = None if bias is None else bias.astype(jnp.float32)
    return apply_softcap(add_bias(apply_scale(products, config.logit_scale), bias), config.logit_softcap)


def logit_params(params: Decoder) -> Decoder:
    """Return the parameters that `compute_logits` reads."""
    embed = params.embed if params.head is None else None
    return Decoder(embed, (), None, params.head, head_bias=params.head_bias)


# Former names, until 0.3: docs/releasing.md
unembed = compute_logits

"""Inputs of layers: an embedding that has numbers for each of them, and what a layer adds by its own.

They are computed once, before the first layer: half is looked up by the token's number, half projected from
its embedding (Gemma 3n and 4).
"""

from typing import Any

from jaxtyping import Array, Float, Int

from .config import Dense, ModelConfig
from .ffn import activate
from .layers import Norm, einsum, norm_spec, normalise, scaled
from .tree import Spec, pytree


@pytree
class PerLayerEmbedding:
    """Parameters that make the inputs of all layers from a token and its embedding."""

    embed: Any  # [V,L,P]
    project: Any  # [D,L,P]
    norm: Norm  # of P numbers


@pytree
class PerLayerGate:
    """Parameters of one layer: its input gates a projection of the residual stream."""

    gate: Any  # [D,P]
    down: Any  # [P,D]
    post_norm: Norm


def inputs_spec(c: ModelConfig) -> PerLayerEmbedding | None:
    """The parameters that make them, where there are any."""
    own, L, D = c.layer_input, c.num_layers, c.hidden_size
    if own is None:
        return None
    V, P = own.vocab_size, own.size
    embed = Spec((V, L, P), ("vocab", "layers", "input"))
    return PerLayerEmbedding(embed, Spec((D, L, P), ("model", "layers", "input")), norm_spec(c.norm, P))


def input_spec(c: ModelConfig) -> PerLayerGate | None:
    """The parameters of one layer."""
    if c.layer_input is None:
        return None
    P, D, depth = c.layer_input.size, c.hidden_size, c.num_layers
    down = Spec((P, D), ("input", "model"), scale=0.02 / (2 * depth) ** 0.5)
    return PerLayerGate(Spec((D, P), ("model", "input")), down, norm_spec(c.norm, D))


def inputs_of(
    w: PerLayerEmbedding | None, c: ModelConfig, tokens: Int[Array, "B T"], x: Float[Array, "B T D"]
) -> list[Float[Array, "B T P"]] | list[None]:
    """The inputs of each layer; `x`: embeddings of the tokens."""
    if w is None or c.layer_input is None:
        return [None] * c.num_layers
    own = scaled(w.embed[tokens], c.layer_input.size**0.5)
    projected = scaled(einsum("btd,dlp->btlp", x, w.project), c.hidden_size**-0.5)
    found = scaled(normalise(projected, w.norm, c.norm) + own, 2**-0.5)
    return [found[:, :, i] for i in range(c.num_layers)]


def with_input(
    w: PerLayerGate, c: ModelConfig, x: Float[Array, "B T D"], own: Float[Array, "B T P"] | None
) -> Float[Array, "B T D"]:
    """The stream after a layer has added what it makes of its input."""
    assert c.layer_input is not None and own is not None
    kind = Dense(c.layer_input.size, c.layer_input.activation)
    inner = activate(kind, einsum("btd,dp->btp", x, w.gate), own)
    return x + normalise(einsum("btp,pd->btd", inner, w.down), w.post_norm, c.norm)

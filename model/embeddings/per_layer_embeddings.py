"""Per-layer inputs (Gemma 3n and 4): an embedding with numbers for each layer, and what each layer adds from
its own.

All are computed once, before the first layer. One half is looked up by token id, the other projected from the
token's embedding.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..config import Dense, ModelConfig
from ..ffn import activate
from ..layers import Norm, NormWeight, apply_scale, einsum, norm_spec, normalise
from ..tree import Spec, pytree
from .encoder import NO_ROW, InputEmbeddings


@pytree
class PerLayerEmbedding:
    """Parameters that make the inputs of all layers from a token and its embedding."""

    embed: Any  # [V,L,P]
    project: Any  # [D,L,P]
    norm: Norm | NormWeight  # of P numbers


@pytree
class PerLayerGate:
    """Parameters of one layer, whose input gates a projection of the residual stream."""

    gate: Any  # [D,P]
    down: Any  # [P,D]
    post_norm: Norm | NormWeight


def per_layer_embedding_spec(c: ModelConfig) -> PerLayerEmbedding | None:
    """Return the specs of the per-layer embedding, or None if the model has no per-layer inputs."""
    layer_input, L, D = c.layer_input, c.num_layers, c.hidden_size
    if layer_input is None:
        return None
    V, P = layer_input.vocab_size, layer_input.size
    embed = Spec((V, L, P), ("vocab", "layers", "input"))
    return PerLayerEmbedding(embed, Spec((D, L, P), ("model", "layers", "input")), norm_spec(c.norm, P))


def per_layer_gate_spec(c: ModelConfig) -> PerLayerGate | None:
    """Return the specs of one layer's gate, or None if the model has no per-layer inputs."""
    if c.layer_input is None:
        return None
    P, D, depth = c.layer_input.size, c.hidden_size, c.num_layers
    down = Spec((P, D), ("input", "model"), scale=0.02 / (2 * depth) ** 0.5)
    return PerLayerGate(Spec((D, P), ("model", "input")), down, norm_spec(c.norm, D))


def compute_layer_inputs(
    w: PerLayerEmbedding | None,
    c: ModelConfig,
    tokens: Int[Array, "B T"],
    x: Float[Array, "B T D"],
    embeddings: InputEmbeddings | None = None,
) -> list[Float[Array, "B T P"]] | list[None]:
    """Return the input of each layer, or None for each. `x`: embeddings of the tokens. Where `embeddings` are
    in their place, the padding token is looked up."""
    if w is None or c.layer_input is None:
        return [None] * c.num_layers
    if embeddings is not None:
        tokens = jnp.where(embeddings.rows > NO_ROW, c.layer_input.pad_token_id, tokens)
    looked_up = apply_scale(w.embed[tokens], c.layer_input.size**0.5)
    projected = apply_scale(einsum("btd,dlp->btlp", x, w.project), c.hidden_size**-0.5)
    inputs = apply_scale(normalise(projected, w.norm, c.norm) + looked_up, 2**-0.5)
    return [inputs[:, :, i] for i in range(c.num_layers)]


def add_layer_input(
    w: PerLayerGate, c: ModelConfig, x: Float[Array, "B T D"], layer_input: Float[Array, "B T P"] | None
) -> Float[Array, "B T D"]:
    """Add to the stream what a layer makes of its input."""
    assert c.layer_input is not None and layer_input is not None
    kind = Dense(c.layer_input.size, c.layer_input.activation)
    inner = activate(kind, einsum("btd,dp->btp", x, w.gate), layer_input)
    return x + normalise(einsum("btp,pd->btd", inner, w.down), w.post_norm, c.norm)

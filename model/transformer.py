"""The decoder: a tree of parameters and its forward pass. It knows neither caches, nor batches of requests, nor meshes."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .attention import Attend
from .config import ModelConfig
from .layers import einsum, rms_norm, rotate, rotation
from .tree import Spec, pytree


@pytree
class Attention:
    """Projections of grouped-query attention; biases are None where the family has none."""

    q: Any  # [D,N,H]
    k: Any  # [D,K,H]
    v: Any  # [D,K,H]
    o: Any  # [N,H,D]
    q_bias: Any = None  # [N,H]
    k_bias: Any = None  # [K,H]
    v_bias: Any = None  # [K,H]
    o_bias: Any = None  # [D]


@pytree
class GatedFFN:
    """SwiGLU (Shazeer, arXiv 2002.05202)."""

    gate: Any  # [D,F]
    up: Any  # [D,F]
    down: Any  # [F,D]
    gate_bias: Any = None  # [F]
    up_bias: Any = None  # [F]
    down_bias: Any = None  # [D]


@pytree
class Layer:
    attention_norm: Any  # [D]
    attention: Attention
    ffn_norm: Any  # [D]
    ffn: GatedFFN


@pytree
class Decoder:
    """All parameters. `head` is None where the embedding is tied to the output."""

    embed: Any  # [V,D]
    layers: tuple[Layer, ...]
    norm: Any  # [D]
    head: Any = None  # [V,D]


def attention_spec(c: ModelConfig) -> Attention:
    def bias(*sizes: int, axes: tuple[str, ...]) -> Spec | None:
        return Spec(sizes, axes, scale=0.0) if c.attention_bias else None

    D, N, K, H = c.hidden_size, c.num_heads, c.num_kv_heads, c.head_size
    return Attention(
        q=Spec((D, N, H), ("model", "heads", "head")),
        k=Spec((D, K, H), ("model", "kv_heads", "head")),
        v=Spec((D, K, H), ("model", "kv_heads", "head")),
        o=Spec((N, H, D), ("heads", "head", "model"), scale=0.02 / (2 * c.num_layers) ** 0.5),
        q_bias=bias(N, H, axes=("heads", "head")),
        k_bias=bias(K, H, axes=("kv_heads", "head")),
        v_bias=bias(K, H, axes=("kv_heads", "head")),
        o_bias=bias(D, axes=("model",)),
    )


def ffn_spec(c: ModelConfig) -> GatedFFN:
    def bias(size: int, axis: str) -> Spec | None:
        return Spec((size,), (axis,), scale=0.0) if c.mlp_bias else None

    D, F = c.hidden_size, c.ffn_size
    return GatedFFN(
        gate=Spec((D, F), ("model", "ffn")),
        up=Spec((D, F), ("model", "ffn")),
        down=Spec((F, D), ("ffn", "model"), scale=0.02 / (2 * c.num_layers) ** 0.5),
        gate_bias=bias(F, "ffn"),
        up_bias=bias(F, "ffn"),
        down_bias=bias(D, "model"),
    )


def decoder_spec(c: ModelConfig) -> Decoder:
    """Every parameter of a decoder, before it has numbers."""
    V, D = c.vocab_size, c.hidden_size
    norm = Spec((D,), ("model",), mean=1.0, scale=0.0)
    layer = Layer(norm, attention_spec(c), norm, ffn_spec(c))
    head = None if c.tied_embeddings else Spec((V, D), ("vocab", "model"))
    return Decoder(Spec((V, D), ("vocab", "model")), (layer,) * c.num_layers, norm, head)


def biased(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + jnp.expand_dims(bias, range(x.ndim - bias.ndim))


def mix(w: Attention, x: Array, turn: tuple[Array, Array], attend: Attend, state: Any, layer: int):
    """Attention of one layer: normed x [B,T,D] -> state, [B,T,D]."""
    q = rotate(biased(einsum("btd,dnh->btnh", x, w.q), w.q_bias), turn)
    k = rotate(biased(einsum("btd,dkh->btkh", x, w.k), w.k_bias), turn)
    v = biased(einsum("btd,dkh->btkh", x, w.v), w.v_bias)
    state, out = attend(state, layer, q, k, v)
    return state, biased(einsum("btnh,nhd->btd", out, w.o), w.o_bias)


def feed_forward(w: GatedFFN, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    gate = jax.nn.silu(biased(einsum("btd,df->btf", x, w.gate), w.gate_bias))
    up = biased(einsum("btd,df->btf", x, w.up), w.up_bias)
    return biased(einsum("btf,fd->btd", gate * up, w.down), w.down_bias)


def forward(
    params: Decoder,
    config: ModelConfig,
    tokens: Int[Array, "B T"],
    positions: Int[Array, "B T"],
    attend: Attend,
    state: Any = None,
) -> tuple[Float[Array, "B T D"], Any]:
    """Hidden states after the last norm, and attend's new state. Layers are unrolled: a scan would copy their weights."""
    turn = rotation(positions, config.rope.frequencies(config.head_size))
    x = params.embed[tokens]
    for i, w in enumerate(params.layers):
        state, mixed = mix(
            w.attention, rms_norm(x, w.attention_norm, config.norm_eps), turn, attend, state, i
        )
        x = x + mixed
        x = x + feed_forward(w.ffn, rms_norm(x, w.ffn_norm, config.norm_eps))
    return rms_norm(x, params.norm, config.norm_eps), state


def unembed(params: Decoder, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
    """Logits in float32."""
    head = params.embed if params.head is None else params.head
    return einsum("...d,vd->...v", hidden, head, jnp.float32)

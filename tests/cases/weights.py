"""Products, weights and a model of every kind of layer, to be compressed."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases.programs import StoredJit

from duetto.model.attention import causal
from duetto.model.config import Dense, Experts, GroupedQuery, Latent, LayerKind, ModelConfig, NormKind
from duetto.model.layers import einsum
from duetto.model.transformer import Decoder, compute_logits, decoder_spec, forward
from duetto.model.tree import Spec, is_spec
from duetto.model.weights.compression.lowrank import LowRank
from duetto.model.weights.quant import Quantised

SCHEMES = ("int8", "int4", "fp8")


# A product of the model, the shapes of x and of the weight, and the weight's name.
PRODUCTS = {
    "q": ("btd,dnh->btnh", (2, 3, 64), (64, 5, 8)),
    "o": ("btnh,nhd->btd", (2, 3, 5, 8), (5, 8, 24)),
    "down": ("btf,fd->btd", (2, 3, 96), (96, 24)),
    "head": ("...d,vd->...v", (2, 3, 64), (40, 64)),
    "v_up": ("bsr,rnu->bsnu", (2, 3, 32), (32, 4, 6)),
    "k_up": ("btnh,rnh->btnr", (2, 3, 4, 6), (32, 4, 6)),
}


EXPERTS = Experts(8, 2, 32, shared=32, scoring="sigmoid", correction=True)
SINKING = Experts(4, 2, 48, "clamped_silu", bias=True, router_bias=True, clamp=2.0)
MIXED = ModelConfig(
    300,
    64,
    (
        LayerKind(GroupedQuery(4, 2, 16, qk_norm=NormKind()), Dense(96)),
        LayerKind(Latent(4, 32, 16, 8, 12, query_rank=24), EXPERTS),
        LayerKind(GroupedQuery(4, 2, 16, bias=True, sinks=True), SINKING),
    ),
)


# One program a product: its steps one by one would be a program each, of every shape.
product = jax.jit(einsum, static_argnums=(0, 3))


def random(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    """Normal numbers, drawn by numpy: jax would compile a program for each shape."""
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def drawn(specs: Any, dtype: Any = jnp.float32, seed: int = 0) -> Any:
    """Random parameters for a tree of specs, drawn by numpy."""
    draw = np.random.default_rng(seed)

    def leaf(spec: Spec) -> jax.Array:
        numbers = spec.mean + spec.scale * draw.standard_normal(spec.shape)
        return jax.device_put(numbers.astype(spec.dtype or dtype))

    return jax.tree.map(leaf, specs, is_leaf=is_spec)


def decisive(config: ModelConfig) -> Any:
    """Specs of a decoder with weights large enough that greedy tokens have clear margins."""
    return jax.tree.map(
        lambda s: replace(s, scale=0.3) if s.mean == 0 else s, decoder_spec(config), is_leaf=is_spec
    )


def is_record(x: Any) -> bool:
    return isinstance(x, Quantised | LowRank)


@jax.jit
def dense(tree: Any) -> Any:
    """A tree with arrays in place of its records."""

    def array(x: Any) -> Any:
        if isinstance(x, LowRank):
            inputs, outputs = (f"{letters}" for letters in ("ijk"[: x.a.ndim - 1], "xyz"[: x.b.ndim - 1]))
            return jnp.einsum(f"{inputs}r,r{outputs}->{inputs}{outputs}", x.a, x.b, precision="highest")
        return x.dequantise(jnp.float32) if isinstance(x, Quantised) else x

    return jax.tree.map(array, tree, is_leaf=is_record)


@partial(StoredJit, static_argnames=["config"])
def logits(params: Decoder, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    return compute_logits(params, config, forward(params, config, tokens, places, causal)[0])

"""Small encoders, and prompts with spans of embeddings that they make."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases.oracle import Model
from cases.weights import drawn
from jaxtyping import Array, Float

from duetto.model.embeddings.prompt import EmbeddingSpan, Prompt
from duetto.model.tree import Spec

BUCKETS = 16, 48
PLACEHOLDER = 7


@dataclass(frozen=True)
class TableEncoder:
    """An encoder whose items are weights of tokens: the item of a single token is that token's embedding."""

    vocab_size: int
    hidden_size: int
    buckets: tuple[int, ...] = BUCKETS

    def spec(self) -> dict[str, Spec]:
        return {"table": Spec((self.vocab_size, self.hidden_size), ("items", "model"))}

    def abstract_input(self, items: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((items, self.vocab_size), jnp.float32)

    def num_rows(self, items: int) -> int:
        return items

    def encode(self, params: Any, encoder_input: Float[Array, "n V"]) -> Float[Array, "n D"]:
        return encoder_input @ params["table"].astype(jnp.float32)


@dataclass(frozen=True)
class PairEncoder:
    """An encoder of a hidden layer. Two items make an embedding, and each embedding knows of all items."""

    item_size: int
    hidden_size: int
    buckets: tuple[int, ...] = BUCKETS

    def spec(self) -> dict[str, Spec]:
        E, D = self.item_size, self.hidden_size
        sizes = {"first": (2 * E, 32), "all": (E, 32), "last": (32, D)}
        return {name: Spec(size, ("inner", "model")) for name, size in sizes.items()}

    def abstract_input(self, items: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {"items": jax.ShapeDtypeStruct((items, self.item_size), jnp.uint8)}

    def num_rows(self, items: int) -> int:
        return items // 2

    def encode(self, params: Any, encoder_input: dict[str, Array]) -> Float[Array, "n D"]:
        x = encoder_input["items"].astype(jnp.float32) / 255
        inner = x.reshape(len(x) // 2, -1) @ params["first"] + x.sum(0, keepdims=True) @ params["all"]
        return jnp.tanh(inner) @ params["last"]


def with_table_encoder(model: Model) -> Model:
    """The model with an encoder that makes the embeddings of its own tokens."""
    encoder = TableEncoder(model.config.vocab_size, model.config.hidden_size)
    table = np.asarray(model.params.embed, np.float32) * model.config.embedding_scale
    params = replace(model.params, encoder={"table": jax.device_put(table.astype(model.params.embed.dtype))})
    return replace(model, config=replace(model.config, encoder=encoder), params=params)


def with_pair_encoder(model: Model) -> Model:
    encoder = PairEncoder(5, model.config.hidden_size)
    params = jax.tree.map(lambda x: 20 * x, drawn(encoder.spec()))
    return replace(
        model, config=replace(model.config, encoder=encoder), params=replace(model.params, encoder=params)
    )


def as_embeddings(tokens: Sequence[int], vocab_size: int, *spans: tuple[int, int]) -> Prompt:
    """The prompt with these tokens, those of [start, end) as embeddings."""
    kept, made = list(tokens), []
    for start, end in spans:
        kept[start:end] = [PLACEHOLDER] * (end - start)
        items = np.eye(vocab_size, dtype=np.float32)[tokens[start:end]]
        made.append(span(start, end - start, items))
    return Prompt(kept, tuple(made))


def picture(seed: int, start: int, count: int) -> EmbeddingSpan:
    """A span of content that only its seed decides, for a `PairEncoder`."""
    items = np.random.default_rng(seed).integers(0, 256, (2 * count, 5), np.uint8)
    return span(start, count, {"items": items})


def span(start: int, count: int, content: Any) -> EmbeddingSpan:
    hasher = hashlib.blake2b(digest_size=16)
    for x in jax.tree.leaves(content):
        hasher.update(repr((x.shape, x.dtype)).encode() + x.tobytes())
    return EmbeddingSpan(start, count, hasher.digest(), content)

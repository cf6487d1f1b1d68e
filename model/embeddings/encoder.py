"""Encoders of content that is not text, and the embeddings that they make, in place of tokens' own."""

from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..tree import pytree


@runtime_checkable
class Encoder(Protocol):
    """Sizes and function of an encoder. Its parameters are `Decoder.encoder`.

    Implementations are frozen and hashable. The repr names everything that decides what `encode` computes:
    stored programs are found by it.
    """

    @property
    def buckets(self) -> tuple[int, ...]:
        """Return the numbers of items to which inputs are padded with zeros, ascending."""
        ...

    def spec(self) -> Any:
        """Return the specs of the parameters."""
        ...

    def abstract_input(self, items: int) -> Any:
        """Return an input of `items` items as shapes. The first axis of every array is the items."""
        ...

    def num_rows(self, items: int) -> int:
        """Return the number of embeddings that `encode` makes of `items` items."""
        ...

    def encode(self, params: Any, encoder_input: Any, /) -> Float[Array, "rows D"]:
        """Encode an input of a bucket's size."""
        ...


@pytree
class InputEmbeddings:
    """Embeddings of a step that take the place of tokens' own.

    rows: int32 [B,T], each token's row of the pool; NO_ROW where the token has its own embedding.
    pool: [R,D], embeddings that encoders have made, after the embedding's scale.
    """

    rows: Any
    pool: Any


NO_ROW = -1  # in `InputEmbeddings.rows`: the token has its own embedding


def insert_embeddings(x: Float[Array, "B T D"], embeddings: InputEmbeddings | None) -> Float[Array, "B T D"]:
    """Replace the embeddings of tokens that have a row of the pool."""
    if embeddings is None:
        return x
    has_row = embeddings.rows > NO_ROW
    return jnp.where(has_row[..., None], embeddings.pool[jnp.where(has_row, embeddings.rows, 0)], x)

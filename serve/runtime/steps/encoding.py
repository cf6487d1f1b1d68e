"""The step of an encoder: one input is encoded into rows of the pool of embeddings."""

from typing import Any

from jaxtyping import Array, Float, Int

from ....model.embeddings.encoder import Encoder


def encode_into_pool(
    encoder: Encoder,
    params: Any,
    pool: Float[Array, "R D"],
    rows: Int[Array, " rows"],
    encoder_input: Any,
) -> Float[Array, "R D"]:
    """Write the embeddings of an input to rows of the pool; those with a row past the pool are padding.

    A call has one input, in the bucket that its size alone decides: no other input changes its bits.
    """
    return pool.at[rows].set(encoder.encode(params, encoder_input).astype(pool.dtype), mode="drop")

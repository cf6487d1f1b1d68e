"""Places of a batch's tokens, indices into B*T, and a verification's tokens as rows of one token each."""

from dataclasses import replace

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from ....kvcache.pages import Batch


def single_token_rows(batch: Batch) -> Batch:
    """Return a batch with one row for each token, [rows,1]: a decode computes these rows with the same
    bits."""
    return unpacked_rows(batch) if batch.packed is None else packed_rows(batch, batch.packed)


def packed_rows(batch: Batch, packed: Int[Array, " rows"]) -> Batch:
    """Return a batch with one row for each of the places `packed`; a place past B*T is an empty row."""
    T = batch.tokens.shape[1]
    row, column = packed // T, packed % T

    def take_rows(x: Shaped[Array, "B *rest"]) -> Shaped[Array, "rows *rest"]:
        return x.at[row].get(mode="clip")

    return replace(
        batch,
        tokens=batch.tokens.at[row, column].get(mode="clip")[:, None],
        start=take_rows(batch.start) + column,
        count=((row < len(batch.start)) & (column < take_rows(batch.count))).astype(jnp.int32),
        page_tables=tuple(map(take_rows, batch.page_tables)),
        slot=take_rows(batch.slot),
        packed=None,
    )


def rows_by_token_index(batch: Batch) -> Int[Array, "B T"]:
    """Return the row of each token among `single_token_rows`; an arbitrary row for places that are not
    packed."""
    B, T = batch.tokens.shape
    if batch.packed is None:
        return jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
    rows = jnp.arange(len(batch.packed), dtype=jnp.int32)
    return jnp.zeros(B * T, jnp.int32).at[batch.packed].set(rows, mode="drop").reshape(B, T)


def token_indices_by_row(batch: Batch) -> Int[Array, " rows"]:
    """Return the place of each row of `single_token_rows`, an index into B*T; past B*T if the row is
    empty."""
    if batch.packed is None:
        return jnp.arange(batch.tokens.size, dtype=jnp.int32)
    return batch.packed


def unpacked_rows(batch: Batch) -> Batch:
    """Return a batch with one row for each of the B*T places."""
    B, T = batch.tokens.shape
    offsets = jnp.arange(T, dtype=jnp.int32)[None]

    def repeat_rows(x: Shaped[Array, "B *rest"]) -> Shaped[Array, "rows *rest"]:
        return jnp.repeat(x, T, axis=0)

    return replace(
        batch,
        tokens=batch.tokens.reshape(B * T, 1),
        start=(batch.start[:, None] + offsets).reshape(-1),
        count=(offsets < batch.count[:, None]).astype(jnp.int32).reshape(-1),
        page_tables=tuple(map(repeat_rows, batch.page_tables)),
        slot=repeat_rows(batch.slot),
    )

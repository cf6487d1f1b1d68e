"""Places of a batch's tokens: those of a verification as rows of one token each."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from ....kvcache.pages import Batch


def rows_of_one(batch: Batch) -> Batch:
    """Return each token of the rows as a row of its own, [rows,1]: what decode computes, with its bits."""
    return each_place(batch) if batch.packed is None else packed_rows(batch, batch.packed)


def packed_rows(batch: Batch, packed: Int[Array, " rows"]) -> Batch:
    """Return the places that hold a token as rows, behind them empty rows."""
    T = batch.tokens.shape[1]
    row, place = packed // T, packed % T

    def of(x: Shaped[Array, "B *rest"]) -> Shaped[Array, "rows *rest"]:
        return x.at[row].get(mode="clip")

    return Batch(
        tokens=batch.tokens.at[row, place].get(mode="clip")[:, None],
        start=of(batch.start) + place,
        count=((row < len(batch.start)) & (place < of(batch.count))).astype(jnp.int32),
        page_tables=tuple(map(of, batch.page_tables)),
        slot=of(batch.slot),
    )


def row_of_place(batch: Batch) -> Int[Array, "B T"]:
    """Return for each token its row among `rows_of_one`; any if there is none."""
    B, T = batch.tokens.shape
    if batch.packed is None:
        return jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
    rows = jnp.arange(len(batch.packed), dtype=jnp.int32)
    return jnp.zeros(B * T, jnp.int32).at[batch.packed].set(rows, mode="drop").reshape(B, T)


def place_of_row(batch: Batch) -> Int[Array, " rows"]:
    """Return for each of `rows_of_one` its place among B*T; any beyond them if it is empty."""
    if batch.packed is None:
        return jnp.arange(batch.tokens.size, dtype=jnp.int32)
    return batch.packed


def each_place(batch: Batch) -> Batch:
    """Return all B*T places as rows."""
    B, T = batch.tokens.shape
    at = jnp.arange(T, dtype=jnp.int32)[None]

    def each(x: Shaped[Array, "B *rest"]) -> Shaped[Array, "rows *rest"]:
        return jnp.repeat(x, T, axis=0)

    return Batch(
        tokens=batch.tokens.reshape(B * T, 1),
        start=(batch.start[:, None] + at).reshape(-1),
        count=(at < batch.count[:, None]).astype(jnp.int32).reshape(-1),
        page_tables=tuple(map(each, batch.page_tables)),
        slot=each(batch.slot),
    )


def at_least(rows: int, x: Float[Array, "B D"]) -> Float[Array, "rows D"]:
    """Pad with zeros to at least `rows` rows."""
    return jnp.pad(x, ((0, max(rows - len(x), 0)), (0, 0)))

"""Places of a batch's tokens: a verification's tokens as rows of one each."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from ....kvcache.pages import Batch


def rows_of_one(batch: Batch) -> Batch:
    """Each token of the rows as a row of its own, [rows,1]: what decode computes, with its bits."""
    return each_place(batch) if batch.packed is None else packed_rows(batch, batch.packed)


def packed_rows(batch: Batch, packed: Int[Array, " rows"]) -> Batch:
    """Those of the B*T places that hold a token; empty rows for the rest."""
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
    """Which of `rows_of_one` a token is; any where there is none."""
    B, T = batch.tokens.shape
    if batch.packed is None:
        return jnp.arange(B * T, dtype=jnp.int32).reshape(B, T)
    rows = jnp.arange(len(batch.packed), dtype=jnp.int32)
    return jnp.zeros(B * T, jnp.int32).at[batch.packed].set(rows, mode="drop").reshape(B, T)


def place_of_row(batch: Batch) -> Int[Array, " rows"]:
    """Which of the B*T places each of `rows_of_one` is; any beyond them for an empty one."""
    if batch.packed is None:
        return jnp.arange(batch.tokens.size, dtype=jnp.int32)
    return batch.packed


def each_place(batch: Batch) -> Batch:
    """All B*T places as rows."""
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
    """The rows, padded with zeros to at least `rows`."""
    return jnp.pad(x, ((0, max(rows - len(x), 0)), (0, 0)))

"""Batches on the host: the rows of one step as numpy arrays, before the program of its shape is called."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from jaxtyping import Int

from ....kvcache.pages import ON_DEVICE, Batch
from ....model.embeddings.encoder import NO_ROW, InputEmbeddings
from .shapes import Shape, Sizes


def empty_batch(sizes: Sizes, shape: Shape, empty_slot: int) -> Batch:
    """Return a batch of empty rows, of which shard i has rows [i * shape.rows, (i + 1) * shape.rows).

    empty_slot: slot of an empty row, past the slots of a shard.
    """
    B, T = sizes.shards * shape.rows, shape.tokens
    tokens, start, count = np.full((B, T), ON_DEVICE, np.int32), np.zeros(B, np.int32), np.zeros(B, np.int32)
    tables = tuple(np.zeros((B, sizes.table_width), np.int32) for _ in sizes.pages)
    embeddings = None
    if sizes.embedding_rows and shape.phase == "prefill":
        embeddings = InputEmbeddings(np.full((B, T), NO_ROW, np.int32), None)
    slots = np.full(B, empty_slot, np.int32)
    return Batch(tokens, start, count, tables, slots, embeddings=embeddings)


def with_embedding_pool(batch: Batch, pool: Any) -> Batch:
    """Return a batch with the pool that its rows of embeddings index, if it has any."""
    if batch.embeddings is None:
        return batch
    return replace(batch, embeddings=replace(batch.embeddings, pool=pool))


def fill_row(
    batch: Batch,
    row: int,
    tokens: Int[np.ndarray, " T"] | list[int],
    start: int,
    pages: Sequence[Int[np.ndarray, " M"] | list[int]],
    slot: int,
) -> None:
    """Write one row of a batch: tokens from position `start` on, and the row's pages of each window."""
    batch.tokens[row, : len(tokens)] = tokens
    batch.start[row], batch.count[row], batch.slot[row] = start, len(tokens), slot
    for table, page_row in zip(batch.page_tables, pages, strict=True):
        table[row, : len(page_row)] = page_row


def with_packed_indices(batch: Batch, shape: Shape, sizes: Sizes) -> Batch:
    """Return a batch with the places of its tokens if the shape is packed: it computes these places only."""
    return (
        replace(batch, packed=packed_token_indices(batch, shape.packed_tokens, sizes.shards))
        if shape.packed_tokens
        else batch
    )


def packed_token_indices(batch: Batch, rows: int, shards: int = 1) -> Int[np.ndarray, " places"]:
    """Return the places that hold tokens, indices into B*T, padded to `rows` places with B*T.

    B is the number of rows of a shard; the places of several shards follow each other.
    """
    T, places = batch.tokens.shape[1], []
    for count in np.split(np.asarray(batch.count), shards):
        occupied = np.flatnonzero(np.arange(T) < count[:, None])
        assert len(occupied) <= rows, f"{len(occupied)} tokens are too many for a verification of {rows}"
        places.append(np.pad(occupied, (0, rows - len(occupied)), constant_values=len(count) * T))
    return np.concatenate(places).astype(np.int32)

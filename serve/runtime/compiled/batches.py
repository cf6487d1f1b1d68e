"""Batches on the host: the rows of one call as numpy arrays, before the program of its shape is called."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from ....kvcache.pages import ON_DEVICE, Batch
from ....sampling.params import NO_TOKEN
from .shapes import Shape, Sizes


@runtime_checkable
class BatchRow(Protocol):
    """A row of a call, which writes itself into a batch."""

    def write(self, batch: Batch, row: int, seats: int) -> None:
        """Fill in row `row`. Slots are numbered within their shard, which has `seats` of them."""
        ...


def batch_of(sizes: Sizes, shape: Shape, rows: Mapping[int, BatchRow]) -> Batch:
    """Return the batch of a call: these rows by their numbers, the others empty."""
    batch = empty_batch(sizes, shape, sizes.max_num_seqs)
    for number, row in rows.items():
        row.write(batch, number, sizes.max_num_seqs)
    return batch


def empty_batch(sizes: Sizes, shape: Shape, empty_slot: int) -> Batch:
    """Return a batch of empty rows; those of shard i begin at i * shape.rows."""
    B, T = sizes.shards * shape.rows, shape.tokens
    tokens, start, count = np.full((B, T), ON_DEVICE, np.int32), np.zeros(B, np.int32), np.zeros(B, np.int32)
    tables = tuple(np.zeros((B, sizes.table_width), np.int32) for _ in sizes.pages)
    after = np.full(B, NO_TOKEN, np.int32) if shape.phase == "prefill" else None
    return Batch(tokens, start, count, tables, np.full(B, empty_slot, np.int32), after)


def fill(
    batch: Batch,
    row: int,
    tokens: Int[np.ndarray, " T"] | list[int],
    start: int,
    pages: Sequence[Int[np.ndarray, " M"] | list[int]],
    slot: int,
) -> None:
    """Write one row of a batch; `pages` has the row's own for each window."""
    batch.tokens[row, : len(tokens)] = tokens
    batch.start[row], batch.count[row], batch.slot[row] = start, len(tokens), slot
    for table, own in zip(batch.page_tables, pages, strict=True):
        table[row, : len(own)] = own


def with_places(batch: Batch, shape: Shape, sizes: Sizes) -> Batch:
    """Return a batch with the places of its tokens, for a shape that computes these alone."""
    return replace(batch, packed=packed(batch, shape.packed, sizes.shards)) if shape.packed else batch


def packed(batch: Batch, rows: int, shards: int = 1) -> Int[np.ndarray, " places"]:
    """Return the places of a batch that hold tokens, at most `rows` of them, then B*T as padding. Places of
    several shards, which have B rows each, follow each other."""
    T, places = batch.tokens.shape[1], []
    for count in np.split(np.asarray(batch.count), shards):
        real = np.flatnonzero(np.arange(T) < count[:, None])
        assert len(real) <= rows, f"{len(real)} tokens are too many for a verification of {rows}"
        places.append(np.pad(real, (0, rows - len(real)), constant_values=len(count) * T))
    return np.concatenate(places).astype(np.int32)

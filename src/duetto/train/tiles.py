"""Functions of rows that are applied to as many rows at a time as the smallest step of an engine has."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

ROW_TILE = 8  # rows of a CPU's canonical decode


def map_row_tiles(f: Callable[[Any], Any], rows: Any, row_tile: int = ROW_TILE) -> Any:
    """Apply a function to `row_tile` rows at a time, of each array of a tree."""
    count = len(jax.tree.leaves(rows)[0])

    def split_rows(x: Any) -> Any:
        padded = jnp.pad(x, ((0, -count % row_tile), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(-1, row_tile, *x.shape[1:])

    tiles = jax.lax.map(f, jax.tree.map(split_rows, rows))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:count], tiles)

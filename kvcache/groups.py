"""Rows in groups of like length: a loop over their blocks takes few steps for rows that have ended."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

FEWEST = 8  # tokens of a group
MOST = 4  # groups


@dataclass(frozen=True)
class Groups:
    """Groups of `size` rows, the longest rows first, and the steps of one loop over all blocks of all groups.

    Arrays of rows are sorted on their second axis. A single group is all rows, as they are.
    """

    size: int
    order: Int[Array, " B"]  # the rows by length
    blocks: Int[Array, " groups"]  # of each group's longest row
    until: Int[Array, " groups"]  # the step after each group's last

    def step(self, i: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, " rows"], Int[Array, ""]]:
        """Step i: the group, its rows, and which of their blocks."""
        if self.single:
            return jnp.int32(0), self.order, i
        group = jnp.sum(i >= self.until)
        rows = jax.lax.dynamic_slice_in_dim(self.order, group * self.size, self.size)
        return group, rows, i - self.until[group] + self.blocks[group]

    @property
    def single(self) -> bool:
        return self.size == len(self.order)

    def sorted(self, x: Shaped[Array, "K B *rest"]) -> Shaped[Array, "K B *rest"]:
        return x if self.single else x[:, self.order]

    def unsorted(self, x: Shaped[Array, "K B *rest"]) -> Shaped[Array, "K B *rest"]:
        """The rows of a sorted array where they were."""
        return x if self.single else x[:, jnp.argsort(self.order)]

    def own(self, x: Shaped[Array, "K B *rest"], group: Int[Array, ""]) -> Shaped[Array, "K rows *rest"]:
        """A group's part of a sorted array."""
        if self.single:
            return x
        return jax.lax.dynamic_slice_in_dim(x, group * self.size, self.size, axis=1)

    def put(
        self, x: Shaped[Array, "K B *rest"], part: Shaped[Array, "K rows *rest"], group: Int[Array, ""]
    ) -> Shaped[Array, "K B *rest"]:
        """A sorted array with a group's part replaced."""
        if self.single:
            return part
        return jax.lax.dynamic_update_slice_in_dim(x, part, group * self.size, axis=1)


def group_size(rows: int, tokens: int) -> int:
    """Rows of `tokens` tokens in a group; all rows where groups would be unequal."""
    size = max(-(-rows // MOST), -(-FEWEST // tokens))
    return rows if rows % size else size


def by_length(blocks: Int[Array, " B"], tokens: int) -> Groups:
    """Up to MOST groups of rows of `tokens` tokens each, of which each has its own number of blocks."""
    B, size = len(blocks), group_size(len(blocks), tokens)
    if size == B:
        return Groups(B, jnp.arange(B, dtype=jnp.int32), blocks.max()[None], blocks.max()[None])
    lengths, order = jax.lax.top_k(blocks, B)
    return Groups(size, order, lengths[::size], jnp.cumsum(lengths[::size]))

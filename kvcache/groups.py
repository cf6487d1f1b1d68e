"""Group rows of similar length, so that a loop over their blocks of keys skips rows that have ended."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

MIN_GROUP_TOKENS = 8  # tokens of a group, at least
MAX_GROUPS = 4  # groups of a batch


@dataclass(frozen=True)
class Groups:
    """Partition of a batch's rows into groups of equal size, and the loop steps that read all their blocks of
    keys.

    Groups are ordered by length, the longest rows first. Arrays of rows are sorted on their second axis. A
    single group has all rows in the batch's order.

    size: rows of a group
    """

    size: int
    order: Int[Array, " B"]  # batch rows, the longest first
    blocks: Int[Array, " groups"]  # blocks of keys of each group's longest row
    end_steps: Int[Array, " groups"]  # loop step after each group's last

    def locate_step(self, i: Int[Array, ""]) -> tuple[Int[Array, ""], Int[Array, " rows"], Int[Array, ""]]:
        """Return what loop step i computes: the group, the batch rows of that group, and the number of their
        block."""
        if self.is_single:
            return jnp.int32(0), self.order, i
        group = jnp.sum(i >= self.end_steps)
        rows = jax.lax.dynamic_slice_in_dim(self.order, group * self.size, self.size)
        return group, rows, i - self.end_steps[group] + self.blocks[group]

    @property
    def is_single(self) -> bool:
        """True if one group has all rows, so that nothing is sorted."""
        return self.size == len(self.order)

    def sort(self, x: Shaped[Array, "K B *rest"]) -> Shaped[Array, "K B *rest"]:
        """Sort the rows of x from the batch's order into the groups' order."""
        return x if self.is_single else x[:, self.order]

    def unsort(self, x: Shaped[Array, "K B *rest"]) -> Shaped[Array, "K B *rest"]:
        """Put the rows of x back from the groups' order into the batch's order."""
        return x if self.is_single else x[:, jnp.argsort(self.order)]

    def slice_group(
        self, x: Shaped[Array, "K B *rest"], group: Int[Array, ""]
    ) -> Shaped[Array, "K rows *rest"]:
        """Return the rows of one group from an array in the groups' order."""
        if self.is_single:
            return x
        return jax.lax.dynamic_slice_in_dim(x, group * self.size, self.size, axis=1)

    def set_group(
        self, x: Shaped[Array, "K B *rest"], part: Shaped[Array, "K rows *rest"], group: Int[Array, ""]
    ) -> Shaped[Array, "K B *rest"]:
        """Return an array in the groups' order, with the rows of one group replaced by `part`."""
        if self.is_single:
            return part
        return jax.lax.dynamic_update_slice_in_dim(x, part, group * self.size, axis=1)


def group_size(rows: int, tokens: int) -> int:
    """Return the rows per group for `rows` rows of `tokens` tokens each; all rows if groups would be
    unequal."""
    size = max(-(-rows // MAX_GROUPS), -(-MIN_GROUP_TOKENS // tokens))
    return rows if rows % size else size


def group_by_length(blocks: Int[Array, " B"], tokens: int) -> Groups:
    """Group rows of `tokens` tokens each into up to `MAX_GROUPS` groups, by the number of key blocks that
    each row reads."""
    B, size = len(blocks), group_size(len(blocks), tokens)
    if size == B:
        return Groups(B, jnp.arange(B, dtype=jnp.int32), blocks.max()[None], blocks.max()[None])
    lengths, order = jax.lax.top_k(blocks, B)
    return Groups(size, order, lengths[::size], jnp.cumsum(lengths[::size]))

"""Trees of draft tokens: a static shape, verified in one pass (SpecInfer, Miao et al., arXiv 2305.09781)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int, Int32

NO_NODE = -1  # the root's parent, and the padding of tables of children
CHAIN_ACCEPTANCE = 0.5  # share of the most likely draft tokens that are accepted
# share of the first, second, ... choice at one position, as reached by small models
RANK_ACCEPTANCE = (CHAIN_ACCEPTANCE, 0.14, 0.08, 0.05, 0.03, 0.02)


@dataclass(frozen=True)
class TokenTree:
    """Shape of a tree of draft tokens. Node 0 is a row's newest token; `parents[i] < i` is the node that node
    i follows.

    A chain of k draft tokens is `TokenTree.from_widths((1,) * k)`. Static under jit. Raises ValueError for
    parents out of order.
    """

    parents: tuple[int, ...]  # of each node; NO_NODE for node 0

    def __post_init__(self):
        if not self.parents or self.parents[0] != NO_NODE:
            raise ValueError(
                f"parents {self.parents} is not allowed: node 0 is the root, with parent {NO_NODE}"
            )
        for node, parent in enumerate(self.parents[1:], 1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"parents[{node}]={parent} is not allowed: a node before it, 0 to {node - 1}"
                )

    @classmethod
    def from_widths(cls, widths: Sequence[int]) -> "TokenTree":
        """Return the full tree in which every node of level i has widths[i] children."""
        parents, level = [NO_NODE], [0]
        for width in widths:
            first = len(parents)
            parents += [node for node in level for _ in range(width)]
            level = list(range(first, len(parents)))
        return cls(tuple(parents))

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> "TokenTree":
        """Return a tree from vLLM's notation: a path of child numbers for every node but the root, such as
        (0,), (1,), (0, 0). Raises ValueError for a path without its parent or elder sibling."""
        ordered = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        node = {(): 0} | {path: i for i, path in enumerate(ordered, 1)}
        for *before, last in ordered:
            if tuple(before) not in node or (last and (*before, last - 1) not in node):
                raise ValueError(
                    f"path {(*before, last)} is not allowed: its parent or elder sibling is missing"
                )
        return cls((NO_NODE, *(node[path[:-1]] for path in ordered)))

    @classmethod
    def from_acceptance(cls, num_drafts: int) -> "TokenTree":
        """Return the tree of `num_drafts` draft tokens with the highest expected acceptance: a chain of top-1
        tokens, and siblings. `CHAIN_ACCEPTANCE` is the assumed acceptance per depth, `RANK_ACCEPTANCE` that
        by rank."""
        candidates = [
            (CHAIN_ACCEPTANCE**depth * share, depth, child)
            for depth in range(num_drafts)
            for child, share in enumerate(RANK_ACCEPTANCE)
        ]
        best = sorted(
            sorted(candidates, key=lambda candidate: -candidate[0])[:num_drafts],
            key=lambda candidate: candidate[1:],
        )
        return cls.from_paths([(0,) * depth + (child,) for _, depth, child in best])

    @property
    def num_nodes(self) -> int:
        """Number of nodes, the root included."""
        return len(self.parents)

    @cached_property
    def depths(self) -> Int32[np.ndarray, " n"]:
        """Depth of each node: its position minus the root's."""
        depths = np.zeros(self.num_nodes, np.int32)
        for node in range(1, self.num_nodes):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    @property
    def depth(self) -> int:
        """Largest number of draft tokens that can be accepted."""
        return int(self.depths.max())

    @cached_property
    def children(self) -> Int32[np.ndarray, "n children"]:
        """Children of each node in order, padded with NO_NODE; one column at least."""
        children_by_node = [
            [n for n, parent in enumerate(self.parents) if parent == node] for node in range(self.num_nodes)
        ]
        table = np.full((self.num_nodes, max(1, *map(len, children_by_node))), NO_NODE, np.int32)
        for row, nodes in zip(table, children_by_node, strict=True):
            row[: len(nodes)] = nodes
        return table

    @cached_property
    def paths(self) -> Int32[np.ndarray, "n path"]:
        """Nodes from the root to each node in order, padded with the root."""
        table = np.zeros((self.num_nodes, self.depth + 1), np.int32)
        for node in range(1, self.num_nodes):
            table[node] = table[self.parents[node]]
            table[node, self.depths[node]] = node
        return table

    @property
    def is_chain_with_siblings(self) -> bool:
        """True if only the first child of a node has children: a chain with alternatives at each position."""
        firsts = {0, *self.children[:, 0].tolist()}
        return all(parent in firsts for parent in self.parents[1:])

    def nodes_at_depth(self, depth: int) -> Int[np.ndarray, " level"]:
        """Return the nodes of one depth."""
        return np.flatnonzero(self.depths == depth)

"""Trees of guesses: a static shape, verified in one pass (SpecInfer, Miao et al., arXiv 2305.09781)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Int, Int32

NO_NODE = -1  # the root's parent, and the padding of tables of children
CHAIN = 0.5  # share of the likeliest guesses that are right
SHARES = (CHAIN, 0.14, 0.08, 0.05, 0.03, 0.02)  # of the first, second, ... choice for one place


@dataclass(frozen=True)
class TokenTree:
    """The shape of a tree of guesses: node 0 is a row's newest token, `parents[i] < i` is the node that node
    i follows.

    A chain of k guesses is `TokenTree.of_widths((1,) * k)`. Static under jit. Raises ValueError for parents
    out of order.
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
    def of_widths(cls, widths: Sequence[int]) -> "TokenTree":
        """The full tree in which every node of level i has widths[i] children."""
        parents, level = [NO_NODE], [0]
        for width in widths:
            first = len(parents)
            parents += [node for node in level for _ in range(width)]
            level = list(range(first, len(parents)))
        return cls(tuple(parents))

    @classmethod
    def of_paths(cls, paths: Sequence[Sequence[int]]) -> "TokenTree":
        """A tree in vLLM's notation: a path of child numbers for every node but the root, such as (0,),
        (1,), (0, 0)."""
        ordered = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        node = {(): 0} | {path: i for i, path in enumerate(ordered, 1)}
        for *before, last in ordered:
            if tuple(before) not in node or (last and (*before, last - 1) not in node):
                raise ValueError(
                    f"path {(*before, last)} is not allowed: its parent or elder sibling is missing"
                )
        return cls((NO_NODE, *(node[path[:-1]] for path in ordered)))

    @classmethod
    def likely(cls, guesses: int) -> "TokenTree":
        """`guesses` guesses where they are worth most: a chain of likeliest tokens, and others beside it
        while those are likelier to be right than its end (with the shares of a first, second, third ...
        choice that small models reach)."""
        places = [
            (CHAIN**depth * share, depth, child)
            for depth in range(guesses)
            for child, share in enumerate(SHARES)
        ]
        chosen = sorted(sorted(places, key=lambda place: -place[0])[:guesses], key=lambda place: place[1:])
        return cls.of_paths([(0,) * depth + (child,) for _, depth, child in chosen])

    @property
    def nodes(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> Int32[np.ndarray, " n"]:
        """Tokens between each node and the root: what its position is beyond the root's."""
        depths = np.zeros(self.nodes, np.int32)
        for node in range(1, self.nodes):
            depths[node] = depths[self.parents[node]] + 1
        return depths

    @property
    def depth(self) -> int:
        """The most guesses that can be accepted."""
        return int(self.depths.max())

    @cached_property
    def children(self) -> Int32[np.ndarray, "n children"]:
        """Each node's children in order, padded with NO_NODE; one column at least."""
        found = [[n for n, parent in enumerate(self.parents) if parent == node] for node in range(self.nodes)]
        table = np.full((self.nodes, max(1, *map(len, found))), NO_NODE, np.int32)
        for row, nodes in zip(table, found, strict=True):
            row[: len(nodes)] = nodes
        return table

    @cached_property
    def paths(self) -> Int32[np.ndarray, "n path"]:
        """The nodes from the root to each node in order, padded with the root."""
        table = np.zeros((self.nodes, self.depth + 1), np.int32)
        for node in range(1, self.nodes):
            table[node] = table[self.parents[node]]
            table[node, self.depths[node]] = node
        return table

    @property
    def is_comb(self) -> bool:
        """True if only the first child of a node has children: a chain with alternatives at each position."""
        firsts = {0, *self.children[:, 0].tolist()}
        return all(parent in firsts for parent in self.parents[1:])

    def level(self, depth: int) -> Int[np.ndarray, " level"]:
        """The nodes of one depth."""
        return np.flatnonzero(self.depths == depth)

"""Draft tokens of a prediction head on the device: a chain or a tree, from the last token's hidden state."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..model.config import ModelConfig
from ..model.draft_head import DraftHead, advance_draft_state
from ..model.transformer import Decoder, compute_logits
from .search import argmax, top_logits
from .token_tree import NO_NODE, TokenTree


def propose_tree(
    head: DraftHead,
    params: Decoder,
    config: ModelConfig,
    hidden: Float[Array, "B D"],
    token: Int[Array, " B"],
    tree: TokenTree,
) -> Int[Array, "B n"]:
    """Return the tokens of every node: `token` at the root, and below each node the head's most likely next
    tokens, best first.

    `hidden` is the state (after the last norm) from which `token` was sampled. Equal logits are taken in
    order of their ids.
    """
    B, D = hidden.shape
    tokens = jnp.zeros((B, tree.num_nodes), token.dtype).at[:, 0].set(token)
    states = {0: hidden}
    for depth in range(tree.depth):
        parents = [int(n) for n in tree.nodes_at_depth(depth) if tree.children[n, 0] != NO_NODE]
        before = jnp.stack([states[n] for n in parents], axis=1)  # [B,parents,D]
        after = advance_draft_state(head, params, before, tokens[:, np.array(parents)])
        ids = top_tokens(compute_logits(params, config, after.reshape(-1, D)), max_children(tree, parents))
        ids = ids.reshape(B, len(parents), -1)
        for i, node in enumerate(parents):
            children = tree.children[node][tree.children[node] != NO_NODE]
            tokens = tokens.at[:, children].set(ids[:, i, : len(children)])
            states |= {int(child): after[:, i] for child in children}
    return tokens


def max_children(tree: TokenTree, nodes: list[int]) -> int:
    """Return the largest number of children of any of the nodes."""
    return int((tree.children[np.array(nodes)] != NO_NODE).sum(axis=1).max())


def top_tokens(logits: Float[Array, "B V"], count: int) -> Int[Array, "B {count}"]:
    """Return the ids of the `count` largest logits of each row, the largest first."""
    return jnp.maximum(argmax(logits), 0)[:, None] if count == 1 else top_logits(logits, count)[1]

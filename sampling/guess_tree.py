"""Guesses of a prediction head on the device: a chain or a tree of tokens, from the hidden state from which
the last token was sampled."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from ..model.config import ModelConfig
from ..model.heads import Head, advance
from ..model.transformer import Decoder, unembed
from .search import argmax, largest
from .token_tree import NO_NODE, TokenTree


def guess_tree(
    head: Head,
    params: Decoder,
    config: ModelConfig,
    hidden: Float[Array, "B D"],
    token: Int[Array, " B"],
    tree: TokenTree,
) -> Int[Array, "B n"]:
    """The tokens of every node: `token` at the root, and below each node the head's likeliest ones after it,
    best first.

    `hidden` is the state (after the last norm) from which `token` was sampled. Equal logits are taken in
    order of their ids.
    """
    B, D = hidden.shape
    tokens = jnp.zeros((B, tree.nodes), token.dtype).at[:, 0].set(token)
    states = {0: hidden}
    for depth in range(tree.depth):
        parents = [int(n) for n in tree.level(depth) if tree.children[n, 0] != NO_NODE]
        before = jnp.stack([states[n] for n in parents], axis=1)  # [B,parents,D]
        after = advance(head, params, before, tokens[:, np.array(parents)])
        ids = likeliest(unembed(params, config, after.reshape(-1, D)), width(tree, parents))
        ids = ids.reshape(B, len(parents), -1)
        for i, node in enumerate(parents):
            children = tree.children[node][tree.children[node] != NO_NODE]
            tokens = tokens.at[:, children].set(ids[:, i, : len(children)])
            states |= {int(child): after[:, i] for child in children}
    return tokens


def width(tree: TokenTree, nodes: list[int]) -> int:
    """The most children that one of the nodes has."""
    return int((tree.children[np.array(nodes)] != NO_NODE).sum(axis=1).max())


def likeliest(logits: Float[Array, "B V"], count: int) -> Int[Array, "B {count}"]:
    return argmax(logits)[:, None] if count == 1 else largest(logits, count)[1]

"""Guesses that branch: a tree of tokens of each row, verified in one pass, of which one path is kept.

A batch has a column for each depth of the tree; its nodes exist on the device only (SpecInfer, Miao et al., arXiv 2305.09781, with
a static tree as Medusa's, arXiv 2401.10774).
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...kvcache.branches import Branches, branches, branching, keep
from ...kvcache.pages import Batch, KVCache, positions
from ...model.config import ModelConfig
from ...model.transformer import forward, unembed
from ...sampling.accept import RULES, Guesses
from ...sampling.heads import guess_tree
from ...sampling.sample import Sampled, largest, sample
from ...sampling.token_tree import TokenTree
from ..programs.step import Output, Slots, awake, emit, in_turn, run
from .chain import Guide, Guided, joined


@dataclass(frozen=True)
class Tree(Guide):
    """Phases of a target whose guesses are a tree. Subclasses guess its nodes."""

    tree: TokenTree

    def verify(
        self, params: Guided, cache: KVCache, slots: Slots, batch: Batch, *, config: ModelConfig
    ) -> tuple[KVCache, Slots, Output]:
        open, batch = batch.tokens < 0, awake(slots, batch)
        mine, rest = self._split(cache)
        rest, tokens = self.nodes(params, rest, slots, batch, open, config)
        own = self._tables(batch, config, self.target)
        hidden, state = self._run(params, mine, slots, own, tokens)
        slots, sampled, taken, steps = self._walk(params, slots, batch, tokens, hidden)
        windows = tuple(layer.mixer.window for layer in self.target.layers)
        mine = keep(state, replace(own, count=steps), self.target.windows, windows, taken)
        path = replace(batch, tokens=jnp.take_along_axis(tokens, taken, axis=1), count=steps)
        return joined(mine, self.follow(params, rest, slots, path, config)), slots, Output(sampled, None)

    def _run(
        self, params: Guided, cache: KVCache, slots: Slots, batch: Batch, tokens: Int[Array, "B n"]
    ) -> tuple[Float[Array, "B n D"], Branches]:
        """Every node as a row of its own, so that the bits are decode's."""
        B, n = tokens.shape
        depths = jnp.asarray(self.tree.depths)[None]

        def each(x: Array) -> Array:
            return jnp.repeat(x, n, axis=0)

        rows = Batch(
            tokens=tokens.reshape(B * n, 1),
            start=(batch.start[:, None] + depths).reshape(-1),
            count=(depths < batch.count[:, None]).astype(jnp.int32).reshape(-1),
            page_tables=tuple(map(each, batch.page_tables)),
            slot=each(batch.slot),
        )
        attend = branching(rows, self.target.windows, self.tree.paths, self.tree.depths)
        lengths = slots.end[rows.slot] - 1
        hidden, state = forward(
            params.target, self.target, rows.tokens, positions(rows), attend, branches(cache), lengths
        )
        return hidden.reshape(B, n, -1), state

    def _walk(
        self,
        params: Guided,
        slots: Slots,
        batch: Batch,
        tokens: Int[Array, "B n"],
        hidden: Float[Array, "B n D"],
    ) -> tuple[Slots, Sampled, Int[Array, "B T"], Int[Array, " B"]]:
        """Sample from the root down as long as a sample is among the guesses that follow; the nodes that were visited, and
        how many."""
        B, n, D = hidden.shape
        T, rows, rule = self.tree.depth + 1, jnp.arange(B, dtype=jnp.int32), RULES[self.acceptance]
        logits = unembed(params.target, self.target, hidden.reshape(B * n, D)).reshape(B, n, -1)
        children = jnp.asarray(self.tree.children)

        def one(i: Array, state: Any) -> tuple[Any, Sampled]:
            slots, going, node, taken, steps = state
            kids, position = children[node], batch.start + i + 1
            real = (kids >= 0) & (i + 1 < batch.count)[:, None]
            guesses = Guesses(jnp.take_along_axis(tokens, jnp.maximum(kids, 0), axis=1), real)
            drawn, which = rule(logits[rows, node], position, batch.slot, going, slots.sampling, guesses)
            slots, token = emit(slots, batch, drawn.token, hidden[rows, node], position, going)
            taken, steps = taken.at[:, i].set(node), steps + going.astype(jnp.int32)
            going = going & (which >= 0) & (token >= 0) & slots.live[batch.slot]
            node = jnp.where(going, kids[rows, jnp.maximum(which, 0)], 0)
            return (slots, going, node, taken, steps), replace(drawn, token=token)

        zero = jnp.zeros(B, jnp.int32)
        start = slots, batch.count > 0, zero, jnp.zeros((B, T), jnp.int32), zero
        (slots, _, _, taken, steps), sampled = in_turn(T, lambda _, state: jnp.any(state[1]), one, start)
        return slots, sampled, taken, steps

    def nodes(
        self,
        params: Guided,
        cache: KVCache,
        slots: Slots,
        batch: Batch,
        open: Bool[Array, "B T"],
        served: ModelConfig,
    ) -> tuple[KVCache, Int[Array, "B n"]]:
        """The guide's cache and the tokens of all nodes; where a depth is not open, all of them are the batch's."""
        raise NotImplementedError

    def _given(self, batch: Batch, open: Bool[Array, "B T"], tokens: Int[Array, "B n"]) -> Int[Array, "B n"]:
        depths = self.tree.depths
        known = ~open[:, depths] | (depths == 0)[None]
        return jnp.where(known, batch.tokens[:, depths], tokens)


class HeadTree(Tree):
    """A tree of the likeliest tokens of a head."""

    def nodes(self, params, cache, slots, batch, open, served):
        hidden = slots.hidden[batch.slot]
        found = guess_tree(params.guide, params.target, self.target, hidden, batch.tokens[:, 0], self.tree)
        return cache, self._given(batch, open, found)


@dataclass(frozen=True)
class DraftTree(Tree):
    """A draft model's chain of samples, and its likeliest other tokens beside it: a comb, so that the draft reads one path."""

    draft: ModelConfig

    def follow(self, params, cache, slots, batch, served) -> KVCache:
        return run(params.guide, cache, slots, self._tables(batch, served, self.draft), self.draft)[1]

    def nodes(self, params, cache, slots, batch, open, served):
        own, node = self._tables(batch, served, self.draft), 0
        tokens = jnp.zeros((len(batch.start), self.tree.nodes), jnp.int32).at[:, 0].set(batch.tokens[:, 0])
        for depth in range(self.tree.depth):
            children = [int(child) for child in self.tree.children[node] if child >= 0]
            count = (depth < own.count).astype(jnp.int32)
            row = replace(own, tokens=tokens[:, node, None], start=own.start + depth, count=count)
            hidden, cache = run(params.guide, cache, slots, row, self.draft)
            found = self._choices(unembed(params.guide, self.draft, hidden[:, 0]), slots, row, len(children))
            given = ~open[:, depth + 1, None]
            found = jnp.where(given, batch.tokens[:, depth + 1, None], found)
            tokens, node = tokens.at[:, jnp.array(children)].set(found), children[0]
        return cache, tokens

    def _choices(self, logits: Float[Array, "B V"], slots: Slots, row: Batch, count: int) -> Array:
        """The token that the draft samples with the target's random numbers, then its likeliest others."""
        drawn = sample(logits, row.start + 1, row.slot, row.count > 0, slots.sampling).token
        rows = jnp.arange(len(drawn), dtype=jnp.int32)
        return largest(logits.at[rows, drawn].set(jnp.inf), count)[1]

"""Phases of a model with a draft model or a head on the device: each row's draft tokens, as a chain or as a
tree, are proposed and verified in one pass.

A batch has a column for each depth of a tree; its nodes exist on the device only, and one path is kept
(SpecInfer, Miao et al., arXiv 2305.09781, with a static tree as Medusa's, arXiv 2401.10774).
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from ....kvcache.branches import Branches, branches, branching, keep
from ....kvcache.pages import ON_DEVICE, Batch, KVCache, positions
from ....kvcache.stages import cache_of, joined
from ....model.config import ModelConfig
from ....model.pair import Pair, PairConfig
from ....model.transformer import forward, unembed
from ....sampling.accept import NONE_KEPT, RULES, DraftTokens
from ....sampling.params import NO_TOKEN
from ....sampling.sample import Sampled
from ....sampling.token_tree import NO_NODE, TokenTree
from ...runtime.steps.phases import Result
from ...runtime.steps.step import Output, Slots, awake, emit, in_turn, judge, step
from .guessers import DraftBatch, DraftProposer


@dataclass(frozen=True)
class DraftSpeculation:
    """Phases of a pair; ON_DEVICE in a batch of `verify` is a token to propose, or opens a depth of the tree.

    The draft model's layers are behind the target's in the cache; a head has none.
    """

    config: PairConfig
    guesser: DraftProposer
    acceptance: str
    tree: TokenTree | None = None

    def prefill(self, params: Pair, cache: KVCache, slots: Slots, batch: Batch) -> Result:
        """Run the target, and write the proposer's keys for the same tokens."""
        mine, rest = self._split(cache)
        own, drafts = self._tables(batch, self.config.target), self._drafts(awake(slots, batch))
        mine, after, out = step(params.target, mine, slots, own, config=self.config.target)
        return joined([mine, self.guesser.follow(params, rest, after, drafts)]), after, out

    def decode(self, params: Pair, cache: KVCache, slots: Slots, batch: Batch) -> Result:
        return self.prefill(params, cache, slots, batch)

    def verify(self, params: Pair, cache: KVCache, slots: Slots, batch: Batch) -> Result:
        open, batch = batch.tokens == ON_DEVICE, awake(slots, batch)
        asked = DraftBatch(self._drafts(batch), open)
        if self.tree is None:
            return self._verify_chain(params, cache, slots, batch, asked)
        return self._verify_tree(params, cache, slots, batch, asked, self.tree)

    def _split(self, cache: KVCache) -> tuple[KVCache, KVCache]:
        """Return the target's layers of a cache, and the draft model's."""
        L = self.config.target.num_layers
        return cache_of(cache, range(L)), cache_of(cache, range(L, len(cache.k)))

    def _tables(self, batch: Batch, own: ModelConfig) -> Batch:
        """Return the batch with the page tables of one model's layers."""
        windows = self.config.windows
        return replace(batch, page_tables=tuple(batch.page_tables[windows.index(w)] for w in own.windows))

    def _drafts(self, batch: Batch) -> Batch:
        return batch if self.config.draft is None else self._tables(batch, self.config.draft)

    def _verify_chain(
        self, params: Pair, cache: KVCache, slots: Slots, batch: Batch, asked: DraftBatch
    ) -> Result:
        target, (mine, rest) = self.config.target, self._split(cache)
        rest, tokens, offers = self.guesser.chain(params, rest, slots, asked)
        own, rule = replace(self._tables(batch, target), tokens=tokens), RULES[self.acceptance]
        mine, slots, out = judge(params.target, mine, slots, own, offers, config=target, rule=rule)
        return joined([mine, rest]), slots, out

    # ------------------------------------------------------------ a tree

    def _verify_tree(
        self, params: Pair, cache: KVCache, slots: Slots, batch: Batch, asked: DraftBatch, tree: TokenTree
    ) -> Result:
        target, (mine, rest) = self.config.target, self._split(cache)
        rest, tokens = self.guesser.nodes(params, rest, slots, asked, tree)
        own = self._tables(batch, target)
        hidden, state = self._run(params, mine, slots, own, tokens, tree)
        slots, sampled, taken, steps = self._walk(params, slots, batch, tokens, hidden, tree)
        windows = tuple(layer.mixer.window for layer in target.layers)
        mine = keep(state, replace(own, count=steps), target.windows, windows, taken)
        path = replace(batch, tokens=jnp.take_along_axis(tokens, taken, axis=1), count=steps)
        rest = self.guesser.follow(params, rest, slots, self._drafts(path))
        return joined([mine, rest]), slots, Output(sampled, None)

    def _run(
        self,
        params: Pair,
        cache: KVCache,
        slots: Slots,
        batch: Batch,
        tokens: Int[Array, "B n"],
        tree: TokenTree,
    ) -> tuple[Float[Array, "B n D"], Branches]:
        """Run every node as a row of its own, with the bits of decode."""
        B, n = tokens.shape
        depths = jnp.asarray(tree.depths)[None]

        def each(x: Shaped[Array, "B *rest"]) -> Shaped[Array, "rows *rest"]:
            return jnp.repeat(x, n, axis=0)

        rows = Batch(
            tokens=tokens.reshape(B * n, 1),
            start=(batch.start[:, None] + depths).reshape(-1),
            count=(depths < batch.count[:, None]).astype(jnp.int32).reshape(-1),
            page_tables=tuple(map(each, batch.page_tables)),
            slot=each(batch.slot),
        )
        attend = branching(rows, self.config.target.windows, tree.paths, tree.depths)
        lengths = slots.end[rows.slot] - 1
        hidden, state = forward(
            params.target, self.config.target, rows.tokens, positions(rows), attend, branches(cache), lengths
        )
        return hidden.reshape(B, n, -1), state

    def _walk(
        self,
        params: Pair,
        slots: Slots,
        batch: Batch,
        tokens: Int[Array, "B n"],
        hidden: Float[Array, "B n D"],
        tree: TokenTree,
    ) -> tuple[Slots, Sampled, Int[Array, "B T"], Int[Array, " B"]]:
        """Sample from the root down as long as a sample is among the draft tokens that follow.

        Returns the slots, the samples, the visited nodes and their number in each row.
        """
        B, n, D = hidden.shape
        T, rows, rule = tree.depth + 1, jnp.arange(B, dtype=jnp.int32), RULES[self.acceptance]
        logits = unembed(params.target, self.config.target, hidden.reshape(B * n, D)).reshape(B, n, -1)
        children = jnp.asarray(tree.children)

        def one(i: Int[Array, ""], state: Any) -> tuple[Any, Sampled]:
            slots, going, node, taken, steps = state
            kids, position = children[node], batch.start + i + 1
            real = (kids != NO_NODE) & (i + 1 < batch.count)[:, None]
            guesses = DraftTokens(jnp.take_along_axis(tokens, jnp.maximum(kids, 0), axis=1), real)
            drawn, which = rule(logits[rows, node], position, batch.slot, going, slots.sampling, guesses)
            slots, token = emit(slots, batch, drawn.token, hidden[rows, node], position, going)
            taken, steps = taken.at[:, i].set(node), steps + going.astype(jnp.int32)
            going = going & (which != NONE_KEPT) & (token != NO_TOKEN) & slots.live[batch.slot]
            node = jnp.where(going, kids[rows, jnp.maximum(which, 0)], 0)
            return (slots, going, node, taken, steps), replace(drawn, token=token)

        zero = jnp.zeros(B, jnp.int32)
        start = slots, batch.count > 0, zero, jnp.zeros((B, T), jnp.int32), zero
        (slots, _, _, taken, steps), sampled = in_turn(T, lambda _, state: jnp.any(state[1]), one, start)
        return slots, sampled, taken, steps

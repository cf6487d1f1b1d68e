"""The seam `DraftProposer`: draft tokens from the device. A head reads the target's last hidden state, a
draft model reads the tokens.

Draft tokens of a row and their verification are one dispatch. A draft model has its keys in the target's
cache, as further layers under the same page tables, so prefix hits, sharing and preemption hold for both.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ....kvcache.pages import Batch, KVCache
from ....model.config import ModelConfig
from ....model.heads import advance
from ....model.pair import Pair
from ....model.transformer import unembed
from ....sampling.accept import RULES, draw_guess, rejection, target_probs
from ....sampling.guess_tree import guess_tree
from ....sampling.sample import sample
from ....sampling.search import argmax, largest
from ....sampling.token_tree import NO_NODE, TokenTree
from ...runtime.steps.step import Slots, column, run


class DraftBatch(NamedTuple):
    """A batch with open tokens, to be proposed. Its page tables are those of the draft model's layers."""

    batch: Batch
    open: Bool[Array, "B T"]


class DraftChain(NamedTuple):
    """The draft model's cache, the batch's tokens with the open ones filled in, and their distributions if
    they were drawn."""

    cache: KVCache
    tokens: Int[Array, "B T"]
    offers: Float[Array, "B T V"] | None = None


@runtime_checkable
class DraftProposer(Protocol):
    """Proposes the open tokens of a batch, as a chain or as the nodes of a tree. `cache` has the draft
    model's own layers."""

    def follow(self, params: Pair, cache: KVCache, slots: Slots, batch: Batch) -> KVCache:
        """Return the cache after the tokens of a batch."""
        ...

    def chain(self, params: Pair, cache: KVCache, slots: Slots, asked: DraftBatch) -> DraftChain:
        """Propose one chain for each row."""
        ...

    def nodes(
        self, params: Pair, cache: KVCache, slots: Slots, asked: DraftBatch, tree: TokenTree
    ) -> tuple[KVCache, Int[Array, "B n"]]:
        """Return the cache and the tokens of all nodes; those of a depth that is not open are the batch's."""
        ...


@dataclass(frozen=True)
class HeadProposer:
    """Proposes the likeliest tokens of a head on the hidden state from which the row's last token was
    sampled."""

    target: ModelConfig

    def follow(self, params: Pair, cache: KVCache, slots: Slots, batch: Batch) -> KVCache:
        return cache

    def chain(self, params: Pair, cache: KVCache, slots: Slots, asked: DraftBatch) -> DraftChain:
        """Take as many steps of the head as the longest row has draft tokens."""
        batch, open = asked

        def one(
            i: Int[Array, ""], chain: tuple[Int[Array, "B T"], Float[Array, "B D"]]
        ) -> tuple[Int[Array, "B T"], Float[Array, "B D"]]:
            tokens, state = chain
            state = advance(params.draft, params.target, state, column(tokens, i))
            guess = argmax(unembed(params.target, self.target, state))
            guess = jnp.where(column(open, i + 1), guess, column(batch.tokens, i + 1))
            return tokens.at[:, i + 1].set(guess), state

        first = batch.tokens, slots.hidden[batch.slot]
        return DraftChain(cache, jax.lax.fori_loop(0, jnp.max(batch.count) - 1, one, first)[0])

    def nodes(
        self, params: Pair, cache: KVCache, slots: Slots, asked: DraftBatch, tree: TokenTree
    ) -> tuple[KVCache, Int[Array, "B n"]]:
        known = ~asked.open[:, tree.depths] | (tree.depths == 0)[None]
        found = self._tokens(params, slots, asked, tree)
        return cache, jnp.where(known, asked.batch.tokens[:, tree.depths], found)

    def _tokens(self, params: Pair, slots: Slots, asked: DraftBatch, tree: TokenTree) -> Int[Array, "B n"]:
        hidden, first = slots.hidden[asked.batch.slot], asked.batch.tokens[:, 0]
        return guess_tree(params.draft, params.target, self.target, hidden, first, tree)


@dataclass(frozen=True)
class DraftModel:
    """Proposes tokens of a small model, one after the other.

    Under the rule `coupled` it samples with the target's own random numbers, which makes equal tokens likely
    (Daliri et al.). Under `rejection` it uses others, and keeps its distributions.
    """

    draft: ModelConfig
    acceptance: str

    def follow(self, params: Pair, cache: KVCache, slots: Slots, batch: Batch) -> KVCache:
        return run(params.draft, cache, slots, batch, self.draft)[1]

    def chain(self, params: Pair, cache: KVCache, slots: Slots, asked: DraftBatch) -> DraftChain:
        """Take T steps of the draft. The last one only writes the keys of the last draft token, which are
        needed if it is right."""
        batch, open = asked
        B, T = batch.tokens.shape

        def one(i: Int[Array, ""], chain: DraftChain) -> DraftChain:
            logits, cache, row = self._next(params, chain.cache, slots, batch, column(chain.tokens, i), i)
            guess, q = self._draw(logits, slots, row)
            after = jnp.minimum(i + 1, T - 1)
            guess = jnp.where(column(open, after), guess, column(batch.tokens, after))
            tokens, offers = chain.tokens.at[:, i + 1].set(guess, mode="drop"), chain.offers
            if offers is not None:
                offers = offers.at[:, i + 1].set(q, mode="drop")
            return DraftChain(cache, tokens, offers)

        drawn = RULES[self.acceptance] is rejection
        offers = jnp.zeros((B, T, self.draft.vocab_size), jnp.float32) if drawn else None
        # as many steps as the longest row has tokens
        return jax.lax.fori_loop(0, jnp.max(batch.count), one, DraftChain(cache, batch.tokens, offers))

    def nodes(
        self, params: Pair, cache: KVCache, slots: Slots, asked: DraftBatch, tree: TokenTree
    ) -> tuple[KVCache, Int[Array, "B n"]]:
        """Propose a chain of samples and the likeliest alternatives at each step: a comb, since the draft
        reads one path."""
        batch, node = asked.batch, 0
        tokens = jnp.zeros((len(batch.start), tree.nodes), jnp.int32).at[:, 0].set(batch.tokens[:, 0])
        for depth in range(tree.depth):
            children = [int(child) for child in tree.children[node] if child != NO_NODE]
            logits, cache, row = self._next(params, cache, slots, batch, tokens[:, node], depth)
            found = self._choices(logits, slots, row, len(children))
            given = ~asked.open[:, depth + 1, None]
            found = jnp.where(given, batch.tokens[:, depth + 1, None], found)
            tokens, node = tokens.at[:, jnp.array(children)].set(found), children[0]
        return cache, tokens

    def _next(
        self,
        params: Pair,
        cache: KVCache,
        slots: Slots,
        batch: Batch,
        token: Int[Array, " B"],
        i: Int[Array, ""] | int,
    ) -> tuple[Float[Array, "B V"], KVCache, Batch]:
        """Return the logits after `token`, the i-th of the batch's rows, and the rows of that one token."""
        count = (i < batch.count).astype(jnp.int32)
        row = replace(batch, tokens=token[:, None], start=batch.start + i, count=count)
        hidden, cache = run(params.draft, cache, slots, row, self.draft)
        return unembed(params.draft, self.draft, hidden[:, 0]), cache, row

    def _draw(
        self, logits: Float[Array, "B V"], slots: Slots, row: Batch
    ) -> tuple[Int[Array, " B"], Float[Array, "B V"] | None]:
        position, live = row.start + 1, row.count > 0
        if RULES[self.acceptance] is not rejection:
            return sample(logits, position, row.slot, live, slots.sampling).token, None
        q = target_probs(logits, position, row.slot, live, slots.sampling)
        return draw_guess(q, slots.sampling.knobs.seed[row.slot], position), q

    def _choices(
        self, logits: Float[Array, "B V"], slots: Slots, row: Batch, count: int
    ) -> Int[Array, "B {count}"]:
        """Return the token that the draft samples with the target's random numbers, then its likeliest
        others."""
        drawn = sample(logits, row.start + 1, row.slot, row.count > 0, slots.sampling).token
        rows = jnp.arange(len(drawn), dtype=jnp.int32)
        return largest(logits.at[rows, drawn].set(jnp.inf), count)[1]

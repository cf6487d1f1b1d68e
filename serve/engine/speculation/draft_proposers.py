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
from ....model.draft_head import advance_draft_state
from ....model.draft_pair import Pair
from ....model.transformer import compute_logits
from ....sampling.accept import RULES, accept_by_rejection, draw_draft, target_probs
from ....sampling.draft_tree import propose_tree
from ....sampling.sample import sample
from ....sampling.search import argmax, top_logits
from ....sampling.token_tree import NO_NODE, TokenTree
from ...runtime.steps.step import Slots, forward_paged, take_column


class DraftBatch(NamedTuple):
    """Rows with tokens to propose.

    batch: rows, with the page tables of the draft model's layers.
    is_open: True for a token to propose.
    """

    batch: Batch
    is_open: Bool[Array, "B T"]


class DraftChain(NamedTuple):
    """Chain of draft tokens for each row.

    cache: cache of the draft model after the chain.
    tokens: tokens of the rows, with the open ones proposed.
    draft_probs: distributions of the draft tokens, if they were sampled by rejection; else None.
    """

    cache: KVCache
    tokens: Int[Array, "B T"]
    draft_probs: Float[Array, "B T V"] | None = None


@runtime_checkable
class DraftProposer(Protocol):
    """Proposes the open tokens of a batch, as a chain or as the nodes of a tree. `cache` has the draft
    model's own layers."""

    def write_cache(self, params: Pair, cache: KVCache, slots: Slots, batch: Batch) -> KVCache:
        """Write the draft model's keys for the tokens of a batch; returns its cache."""
        ...

    def propose_chain(
        self, params: Pair, cache: KVCache, slots: Slots, draft_batch: DraftBatch
    ) -> DraftChain:
        """Propose one chain of draft tokens for each row."""
        ...

    def propose_nodes(
        self, params: Pair, cache: KVCache, slots: Slots, draft_batch: DraftBatch, tree: TokenTree
    ) -> tuple[KVCache, Int[Array, "B n"]]:
        """Propose the tokens of all nodes of a tree; returns the cache and the tokens.

        At a depth that is not open, all nodes have the batch's token.
        """
        ...


@dataclass(frozen=True)
class HeadProposer:
    """Proposes the likeliest tokens of a head on the hidden state from which the row's last token was
    sampled."""

    target_config: ModelConfig

    def write_cache(self, params: Pair, cache: KVCache, slots: Slots, batch: Batch) -> KVCache:
        return cache

    def propose_chain(
        self, params: Pair, cache: KVCache, slots: Slots, draft_batch: DraftBatch
    ) -> DraftChain:
        """Propose a chain of the head's likeliest tokens, in as many steps as the longest row has draft
        tokens."""
        batch, is_open = draft_batch

        def propose_next(
            i: Int[Array, ""], chain: tuple[Int[Array, "B T"], Float[Array, "B D"]]
        ) -> tuple[Int[Array, "B T"], Float[Array, "B D"]]:
            tokens, state = chain
            state = advance_draft_state(params.draft, params.target, state, take_column(tokens, i))
            next_token = jnp.maximum(argmax(compute_logits(params.target, self.target_config, state)), 0)
            next_token = jnp.where(take_column(is_open, i + 1), next_token, take_column(batch.tokens, i + 1))
            return tokens.at[:, i + 1].set(next_token), state

        first = batch.tokens, slots.hidden[batch.slot]
        return DraftChain(cache, jax.lax.fori_loop(0, jnp.max(batch.count) - 1, propose_next, first)[0])

    def propose_nodes(
        self, params: Pair, cache: KVCache, slots: Slots, draft_batch: DraftBatch, tree: TokenTree
    ) -> tuple[KVCache, Int[Array, "B n"]]:
        is_known = ~draft_batch.is_open[:, tree.depths] | (tree.depths == 0)[None]
        proposed = self._propose_tree(params, slots, draft_batch, tree)
        return cache, jnp.where(is_known, draft_batch.batch.tokens[:, tree.depths], proposed)

    def _propose_tree(
        self, params: Pair, slots: Slots, draft_batch: DraftBatch, tree: TokenTree
    ) -> Int[Array, "B n"]:
        hidden, first = slots.hidden[draft_batch.batch.slot], draft_batch.batch.tokens[:, 0]
        return propose_tree(params.draft, params.target, self.target_config, hidden, first, tree)


@dataclass(frozen=True)
class DraftModelProposer:
    """Proposes tokens of a small model, one after the other.

    Under the rule `coupled` it samples with the target's own random numbers, which makes equal tokens likely
    (Daliri et al.). Under `rejection` it uses others, and keeps its distributions.
    """

    draft_config: ModelConfig
    acceptance: str

    def write_cache(self, params: Pair, cache: KVCache, slots: Slots, batch: Batch) -> KVCache:
        return forward_paged(params.draft, cache, slots, batch, self.draft_config)[1]

    def propose_chain(
        self, params: Pair, cache: KVCache, slots: Slots, draft_batch: DraftBatch
    ) -> DraftChain:
        """Propose a chain in T steps of the draft model. The last step only writes the last draft token's
        keys.

        They are needed if that token is accepted.
        """
        batch, is_open = draft_batch
        B, T = batch.tokens.shape

        def propose_next(i: Int[Array, ""], chain: DraftChain) -> DraftChain:
            logits, cache, token_batch = self._draft_logits(
                params, chain.cache, slots, batch, take_column(chain.tokens, i), i
            )
            next_token, q = self._draw_token(logits, slots, token_batch)
            after = jnp.minimum(i + 1, T - 1)
            next_token = jnp.where(take_column(is_open, after), next_token, take_column(batch.tokens, after))
            tokens, draft_probs = chain.tokens.at[:, i + 1].set(next_token, mode="drop"), chain.draft_probs
            if draft_probs is not None:
                draft_probs = draft_probs.at[:, i + 1].set(q, mode="drop")
            return DraftChain(cache, tokens, draft_probs)

        is_rejection = RULES[self.acceptance] is accept_by_rejection
        draft_probs = jnp.zeros((B, T, self.draft_config.vocab_size), jnp.float32) if is_rejection else None
        # one step for each token of the longest row
        return jax.lax.fori_loop(
            0, jnp.max(batch.count), propose_next, DraftChain(cache, batch.tokens, draft_probs)
        )

    def propose_nodes(
        self, params: Pair, cache: KVCache, slots: Slots, draft_batch: DraftBatch, tree: TokenTree
    ) -> tuple[KVCache, Int[Array, "B n"]]:
        """Propose a chain of samples and the likeliest alternatives at each step: a comb, since the draft
        reads one path."""
        batch, node = draft_batch.batch, 0
        tokens = jnp.zeros((len(batch.start), tree.num_nodes), jnp.int32).at[:, 0].set(batch.tokens[:, 0])
        for depth in range(tree.depth):
            children = [int(child) for child in tree.children[node] if child != NO_NODE]
            logits, cache, token_batch = self._draft_logits(
                params, cache, slots, batch, tokens[:, node], depth
            )
            proposed = self._draw_children(logits, slots, token_batch, len(children))
            is_given = ~draft_batch.is_open[:, depth + 1, None]
            proposed = jnp.where(is_given, batch.tokens[:, depth + 1, None], proposed)
            tokens, node = tokens.at[:, jnp.array(children)].set(proposed), children[0]
        return cache, tokens

    def _draft_logits(
        self,
        params: Pair,
        cache: KVCache,
        slots: Slots,
        batch: Batch,
        token: Int[Array, " B"],
        i: Int[Array, ""] | int,
    ) -> tuple[Float[Array, "B V"], KVCache, Batch]:
        """Return the logits after `token`, the i-th token of each row; the cache; and a batch of that one
        token."""
        count = (i < batch.count).astype(jnp.int32)
        token_batch = replace(batch, tokens=token[:, None], start=batch.start + i, count=count)
        hidden, cache = forward_paged(params.draft, cache, slots, token_batch, self.draft_config)
        return compute_logits(params.draft, self.draft_config, hidden[:, 0]), cache, token_batch

    def _draw_token(
        self, logits: Float[Array, "B V"], slots: Slots, token_batch: Batch
    ) -> tuple[Int[Array, " B"], Float[Array, "B V"] | None]:
        position, live = token_batch.start + 1, token_batch.count > 0
        if RULES[self.acceptance] is not accept_by_rejection:
            return jnp.maximum(
                sample(logits, position, token_batch.slot, live, slots.sampling).token, 0
            ), None
        q = target_probs(logits, position, token_batch.slot, live, slots.sampling)
        q = jnp.where(jnp.isnan(q), jnp.inf, q)  # no token of an infinite distribution is accepted
        return draw_draft(q, slots.sampling.knobs.seed[token_batch.slot], position), q

    def _draw_children(
        self, logits: Float[Array, "B V"], slots: Slots, token_batch: Batch, count: int
    ) -> Int[Array, "B {count}"]:
        """Return the token that the draft samples with the target's random numbers, then its likeliest
        others."""
        sampled = jnp.maximum(
            sample(
                logits, token_batch.start + 1, token_batch.slot, token_batch.count > 0, slots.sampling
            ).token,
            0,
        )
        rows = jnp.arange(len(sampled), dtype=jnp.int32)
        return top_logits(logits.at[rows, sampled].set(jnp.inf), count)[1]

"""Phases of a model with a draft model or a head on the device: each row's draft tokens, as a chain or as a
tree, are proposed and verified in one pass.

A batch has a column for each depth of a tree; its nodes exist on the device only, and one path is kept
(SpecInfer, Miao et al., arXiv 2305.09781, with a static tree as Medusa's, arXiv 2401.10774).
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from ....kvcache.pages import ON_DEVICE, Batch, KVCache, token_positions
from ....kvcache.stages import join_caches, stage_cache
from ....kvcache.tree_attention import Branches, commit_branches, initial_branches, make_branch_attend
from ....model.config import ModelConfig
from ....model.draft_pair import Pair, PairConfig
from ....model.transformer import compute_logits, forward
from ....sampling.accept import NONE_ACCEPTED, RULES, DraftTokens
from ....sampling.params import NO_TOKEN
from ....sampling.sample import Sampled
from ....sampling.token_tree import NO_NODE, TokenTree
from ...runtime.steps.output import Output, SampleRows
from ...runtime.steps.phases import PhaseResult
from ...runtime.steps.step import (
    Slots,
    resolve_device_tokens,
    run_sampling_loop,
    run_step,
    store_sampled_tokens,
    verify_rows,
)
from .draft_proposers import DraftBatch, DraftProposer


@dataclass(frozen=True)
class DraftSpeculation:
    """Phases of a target with a draft model or a head.

    ON_DEVICE in a batch of `verify` is a token to propose, or opens a depth of the tree. In the cache the
    draft model's layers follow the target's; a head has none.

    proposer: proposes the draft tokens.
    acceptance: name of the rule in RULES.
    tree: tree of draft tokens; None if a draft is a chain.
    """

    config: PairConfig
    proposer: DraftProposer
    acceptance: str
    tree: TokenTree | None = None

    def prefill(self, params: Pair, cache: KVCache, slots: Slots, batch: Batch) -> PhaseResult:
        """Run the target, and write the draft model's keys for the same tokens."""
        target_cache, draft_cache = self._split_cache(cache)
        target_batch = self._with_tables(batch, self.config.target)
        draft_batch = self._with_draft_tables(resolve_device_tokens(slots, batch))
        target_cache, after, out = run_step(
            params.target, target_cache, slots, target_batch, config=self.config.target
        )
        return (
            join_caches([target_cache, self.proposer.write_cache(params, draft_cache, after, draft_batch)]),
            after,
            out,
        )

    def decode(self, params: Pair, cache: KVCache, slots: Slots, batch: Batch) -> PhaseResult:
        return self.prefill(params, cache, slots, batch)

    def verify(self, params: Pair, cache: KVCache, slots: Slots, batch: Batch) -> PhaseResult:
        is_open, batch = batch.tokens == ON_DEVICE, resolve_device_tokens(slots, batch)
        draft_batch = DraftBatch(self._with_draft_tables(batch), is_open)
        if self.tree is None:
            return self._verify_chain(params, cache, slots, batch, draft_batch)
        return self._verify_tree(params, cache, slots, batch, draft_batch, self.tree)

    def _split_cache(self, cache: KVCache) -> tuple[KVCache, KVCache]:
        """Return the target's layers of a cache, and the draft model's."""
        L = self.config.target.num_layers
        return stage_cache(cache, range(L)), stage_cache(cache, range(L, len(cache.k)))

    def _with_tables(self, batch: Batch, model_config: ModelConfig) -> Batch:
        """Return the batch with the page tables of one model's layers."""
        windows = self.config.windows
        return replace(
            batch, page_tables=tuple(batch.page_tables[windows.index(w)] for w in model_config.windows)
        )

    def _with_draft_tables(self, batch: Batch) -> Batch:
        return batch if self.config.draft is None else self._with_tables(batch, self.config.draft)

    def _verify_chain(
        self, params: Pair, cache: KVCache, slots: Slots, batch: Batch, draft_batch: DraftBatch
    ) -> PhaseResult:
        target, (target_cache, draft_cache) = self.config.target, self._split_cache(cache)
        draft_cache, tokens, draft_probs = self.proposer.propose_chain(
            params, draft_cache, slots, draft_batch
        )
        target_batch, rule = replace(self._with_tables(batch, target), tokens=tokens), RULES[self.acceptance]
        target_cache, slots, out = verify_rows(
            params.target, target_cache, slots, target_batch, draft_probs, config=target, rule=rule
        )
        return join_caches([target_cache, draft_cache]), slots, out

    # ------------------------------------------------------------ a tree

    def _verify_tree(
        self,
        params: Pair,
        cache: KVCache,
        slots: Slots,
        batch: Batch,
        draft_batch: DraftBatch,
        tree: TokenTree,
    ) -> PhaseResult:
        target, (target_cache, draft_cache) = self.config.target, self._split_cache(cache)
        draft_cache, tokens = self.proposer.propose_nodes(params, draft_cache, slots, draft_batch, tree)
        target_batch = self._with_tables(batch, target)
        hidden, state = self._run_nodes(params, target_cache, slots, target_batch, tokens, tree)
        slots, sampled, visited, steps = self._sample_tree_path(params, slots, batch, tokens, hidden, tree)
        windows = tuple(layer.mixer.window for layer in target.layers)
        target_cache = commit_branches(
            state, replace(target_batch, count=steps), target.windows, windows, visited
        )
        path = replace(batch, tokens=jnp.take_along_axis(tokens, visited, axis=1), count=steps)
        draft_cache = self.proposer.write_cache(params, draft_cache, slots, self._with_draft_tables(path))
        return join_caches([target_cache, draft_cache]), slots, Output(sampled)

    def _run_nodes(
        self,
        params: Pair,
        cache: KVCache,
        slots: Slots,
        batch: Batch,
        tokens: Int[Array, "B n"],
        tree: TokenTree,
    ) -> tuple[Float[Array, "B n D"], Branches]:
        """Run every node as a row of one token, which gives the bits of decode."""
        B, n = tokens.shape
        depths = jnp.asarray(tree.depths)[None]

        def repeat_per_node(x: Shaped[Array, "B *rest"]) -> Shaped[Array, "rows *rest"]:
            return jnp.repeat(x, n, axis=0)

        rows = replace(
            batch,
            tokens=tokens.reshape(B * n, 1),
            start=(batch.start[:, None] + depths).reshape(-1),
            count=(depths < batch.count[:, None]).astype(jnp.int32).reshape(-1),
            page_tables=tuple(map(repeat_per_node, batch.page_tables)),
            slot=repeat_per_node(batch.slot),
        )
        attend = make_branch_attend(rows, self.config.target.windows, tree.paths, tree.depths)
        lengths = slots.end[rows.slot] - 1
        hidden, state = forward(
            params.target,
            self.config.target,
            rows.tokens,
            token_positions(rows),
            attend,
            initial_branches(cache),
            lengths,
        )
        return hidden.reshape(B, n, -1), state

    def _sample_tree_path(
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
        logits = compute_logits(params.target, self.config.target, hidden.reshape(B * n, D)).reshape(B, n, -1)
        children = jnp.asarray(tree.children)

        def visit_node(i: Int[Array, ""], state: Any) -> tuple[Any, Sampled]:
            slots, is_accepting, node, visited, steps = state
            child_nodes, position = children[node], batch.start + i + 1
            is_child = (child_nodes != NO_NODE) & (i + 1 < batch.count)[:, None]
            candidates = DraftTokens(
                jnp.take_along_axis(tokens, jnp.maximum(child_nodes, 0), axis=1), is_child
            )
            drawn, which = rule(
                logits[rows, node], position, batch.slot, is_accepting, slots.sampling, candidates
            )
            sampling = SampleRows(hidden[rows, node], batch.slot, position, is_accepting)
            slots, token = store_sampled_tokens(slots, sampling, drawn.token)
            visited, steps = visited.at[:, i].set(node), steps + is_accepting.astype(jnp.int32)
            is_accepting = (
                is_accepting & (which != NONE_ACCEPTED) & (token != NO_TOKEN) & slots.live[batch.slot]
            )
            node = jnp.where(is_accepting, child_nodes[rows, jnp.maximum(which, 0)], 0)
            return (slots, is_accepting, node, visited, steps), replace(drawn, token=token)

        zero = jnp.zeros(B, jnp.int32)
        start = slots, batch.count > 0, zero, jnp.zeros((B, T), jnp.int32), zero
        (slots, _, _, visited, steps), sampled = run_sampling_loop(
            T, lambda _, state: jnp.any(state[1]), visit_node, start
        )
        return slots, sampled, visited, steps

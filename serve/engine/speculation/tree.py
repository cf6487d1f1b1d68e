"""Guesses that branch: a tree of tokens of each row, verified in one pass, of which one path is kept.

A batch has a column for each depth of the tree; its nodes exist on the device only (SpecInfer, Miao et al.,
arXiv 2305.09781, with a static tree as Medusa's, arXiv 2401.10774).
"""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from ....kvcache.branches import Branches, branches, branching, keep
from ....kvcache.pages import ON_DEVICE, Batch, KVCache, positions
from ....model.pair import Pair, PairConfig
from ....model.transformer import forward, unembed
from ....sampling.accept import NONE_KEPT, RULES, DraftTokens
from ....sampling.params import NO_TOKEN
from ....sampling.sample import Sampled
from ....sampling.token_tree import NO_NODE, TokenTree
from ...runtime.steps.phases import Result
from ...runtime.steps.step import Output, Slots, awake, emit, in_turn
from .chain import both, of_draft, of_target, split, together
from .guessers import DraftBatch, DraftProposer


@dataclass(frozen=True)
class TreeSpeculation:
    """Phases of a pair whose guesses are a tree; ON_DEVICE in `verify`'s batch opens its depth."""

    config: PairConfig
    guesser: DraftProposer
    acceptance: str
    tree: TokenTree

    def prefill(self, params: Pair, cache: KVCache, slots: Slots, batch: Batch) -> Result:
        return both(self.config, self.guesser, params, cache, slots, batch)

    def decode(self, params: Pair, cache: KVCache, slots: Slots, batch: Batch) -> Result:
        return both(self.config, self.guesser, params, cache, slots, batch)

    def verify(self, params: Pair, cache: KVCache, slots: Slots, batch: Batch) -> Result:
        target, open, batch = self.config.target, batch.tokens == ON_DEVICE, awake(slots, batch)
        mine, rest = split(self.config, cache)
        asked = DraftBatch(of_draft(self.config, batch), open)
        rest, tokens = self.guesser.nodes(params, rest, slots, asked, self.tree)
        own = of_target(self.config, batch)
        hidden, state = self._run(params, mine, slots, own, tokens)
        slots, sampled, taken, steps = self._walk(params, slots, batch, tokens, hidden)
        windows = tuple(layer.mixer.window for layer in target.layers)
        mine = keep(state, replace(own, count=steps), target.windows, windows, taken)
        path = replace(batch, tokens=jnp.take_along_axis(tokens, taken, axis=1), count=steps)
        rest = self.guesser.follow(params, rest, slots, of_draft(self.config, path))
        return together(mine, rest), slots, Output(sampled, None)

    def _run(
        self, params: Pair, cache: KVCache, slots: Slots, batch: Batch, tokens: Int[Array, "B n"]
    ) -> tuple[Float[Array, "B n D"], Branches]:
        """Every node as a row of its own, so that the bits are decode's."""
        B, n = tokens.shape
        depths = jnp.asarray(self.tree.depths)[None]

        def each(x: Shaped[Array, "B *rest"]) -> Shaped[Array, "rows *rest"]:
            return jnp.repeat(x, n, axis=0)

        rows = Batch(
            tokens=tokens.reshape(B * n, 1),
            start=(batch.start[:, None] + depths).reshape(-1),
            count=(depths < batch.count[:, None]).astype(jnp.int32).reshape(-1),
            page_tables=tuple(map(each, batch.page_tables)),
            slot=each(batch.slot),
        )
        attend = branching(rows, self.config.target.windows, self.tree.paths, self.tree.depths)
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
    ) -> tuple[Slots, Sampled, Int[Array, "B T"], Int[Array, " B"]]:
        """Sample from the root down as long as a sample is among the guesses that follow; the nodes that were
        visited, and how many."""
        B, n, D = hidden.shape
        T, rows, rule = self.tree.depth + 1, jnp.arange(B, dtype=jnp.int32), RULES[self.acceptance]
        logits = unembed(params.target, self.config.target, hidden.reshape(B * n, D)).reshape(B, n, -1)
        children = jnp.asarray(self.tree.children)

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

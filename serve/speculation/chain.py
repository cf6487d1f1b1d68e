"""Guesses that the device makes: the three phases of a step for a model with something beside it that guesses.

The guesses of a row and their verification are one dispatch. What guesses has its keys in the same cache, as more layers, under
the same page tables: prefixes that are found, shared or preempted are so for both.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ...kvcache.pages import Batch, KVCache
from ...model.config import ModelConfig
from ...model.transformer import Decoder, unembed
from ...model.tree import pytree
from ...sampling.accept import RULES, draw_guess, rejection, target_probs
from ...sampling.heads import guess_tree
from ...sampling.sample import sample
from ...sampling.token_tree import TokenTree
from ..programs.step import Output, Slots, awake, column, judge, run, step


@pytree
class Guided:
    """A decoder's parameters and those of what guesses for it. To a cache they are one decoder with the layers of both."""

    target: Decoder
    guide: Any  # a Decoder or a Head

    @property
    def embed(self) -> Any:
        return self.target.embed

    @property
    def layers(self) -> tuple[Any, ...]:
        own = self.guide.layers if isinstance(self.guide, Decoder) else ()
        return (*self.target.layers, *own)


def target_of(params: Any) -> Decoder:
    """The parameters that decide on tokens."""
    return params.target if isinstance(params, Guided) else params


def with_target(params: Any, target: Any) -> Any:
    """The same with other parameters to decide on tokens."""
    return replace(params, target=target) if isinstance(params, Guided) else target


def served(target: ModelConfig, guide: ModelConfig | None) -> ModelConfig:
    """What a cache and its page tables see of a target and a draft model."""
    return target if guide is None else replace(target, layers=(*target.layers, *guide.layers))


Guesses = tuple[KVCache, Int[Array, "B T"], Float[Array, "B T V"] | None]


@dataclass(frozen=True)
class Guide:
    """Phases of a target that is guided; a token below zero in a batch of `verify` is one to guess. Subclasses guess."""

    target: ModelConfig
    acceptance: str

    def prefill(self, params: Guided, cache: KVCache, slots: Slots, batch: Batch, *, config: ModelConfig):
        return self.decode(params, cache, slots, batch, config=config)

    def decode(
        self, params: Guided, cache: KVCache, slots: Slots, batch: Batch, *, config: ModelConfig
    ) -> tuple[KVCache, Slots, Output]:
        """One step of `serve.step` for the target, and the guide's own keys for the same tokens."""
        seen, (mine, rest) = awake(slots, batch), self._split(cache)
        mine, slots, out = step(
            params.target, mine, slots, self._tables(batch, config, self.target), config=self.target
        )
        return joined(mine, self.follow(params, rest, slots, seen, config)), slots, out

    def verify(
        self, params: Guided, cache: KVCache, slots: Slots, batch: Batch, *, config: ModelConfig
    ) -> tuple[KVCache, Slots, Output]:
        open, batch = batch.tokens < 0, awake(slots, batch)
        mine, rest = self._split(cache)
        rest, tokens, offers = self.guess(params, rest, slots, batch, open, config)
        batch = replace(self._tables(batch, config, self.target), tokens=tokens)
        rule = RULES[self.acceptance]
        mine, slots, out = judge(params.target, mine, slots, batch, offers, config=self.target, rule=rule)
        return joined(mine, rest), slots, out

    def _split(self, cache: KVCache) -> tuple[KVCache, KVCache]:
        L = self.target.num_layers
        return KVCache(cache.k[:L], cache.v[:L]), KVCache(cache.k[L:], cache.v[L:])

    def _tables(self, batch: Batch, served: ModelConfig, config: ModelConfig) -> Batch:
        """The batch with the page tables of one of the two models only."""
        tables = tuple(batch.page_tables[served.windows.index(w)] for w in config.windows)
        return replace(batch, page_tables=tables)

    def follow(
        self, params: Guided, cache: KVCache, slots: Slots, batch: Batch, served: ModelConfig
    ) -> KVCache:
        """The guide's cache after the tokens of a batch."""
        return cache

    def guess(
        self,
        params: Guided,
        cache: KVCache,
        slots: Slots,
        batch: Batch,
        open: Bool[Array, "B T"],
        served: ModelConfig,
    ) -> Guesses:
        """The guide's cache, the batch's tokens with the open ones guessed, and their distributions where they were drawn."""
        raise NotImplementedError


class Heads(Guide):
    """Guesses of a head on the hidden state from which the row's last token was sampled; always the likeliest."""

    def guess(self, params, cache, slots, batch, open, served) -> Guesses:
        chain = TokenTree.of_widths((1,) * (batch.tokens.shape[1] - 1))
        hidden = slots.hidden[batch.slot]
        found = guess_tree(params.guide, params.target, self.target, hidden, batch.tokens[:, 0], chain)
        return cache, jnp.where(open, found, batch.tokens).at[:, 0].set(batch.tokens[:, 0]), None


@dataclass(frozen=True)
class DraftModel(Guide):
    """Guesses of a small model, one token after the other.

    Under the rule `coupled` it samples with the target's own random numbers, which makes equal tokens likely (Daliri et al.);
    under `rejection` with others, and its distributions are kept.
    """

    draft: ModelConfig

    def follow(self, params, cache, slots, batch, served) -> KVCache:
        return run(params.guide, cache, slots, self._tables(batch, served, self.draft), self.draft)[1]

    def guess(self, params, cache, slots, batch, open, served) -> Guesses:
        """T steps of the draft: the last writes the keys of the last guess only, so that none is missing if it is right."""
        T, batch = batch.tokens.shape[1], self._tables(batch, served, self.draft)

        def one(carry: tuple[Array, KVCache], i: Array) -> tuple[Any, Any]:
            token, cache = carry
            count = (i < batch.count).astype(jnp.int32)
            single = replace(batch, tokens=token[:, None], start=batch.start + i, count=count)
            hidden, cache = run(params.guide, cache, slots, single, self.draft)
            guess, q = self._draw(unembed(params.guide, self.draft, hidden[:, 0]), slots, single)
            after = jnp.minimum(i + 1, T - 1)
            guess = jnp.where(column(open, after), guess, column(batch.tokens, after))
            return (guess, cache), (guess, q)

        first, at = batch.tokens[:, 0], jnp.arange(T, dtype=jnp.int32)
        (_, cache), (tokens, offers) = jax.lax.scan(one, (first, cache), at)
        tokens = jnp.concatenate([first[:, None], tokens[:-1].T], axis=1)
        if offers is not None:
            offers = jnp.roll(offers, 1, axis=0).swapaxes(0, 1)  # of the token that stands there
        return cache, tokens, offers

    def _draw(self, logits: Float[Array, "B V"], slots: Slots, row: Batch) -> tuple[Array, Array | None]:
        position, live = row.start + 1, row.count > 0
        if RULES[self.acceptance] is not rejection:
            return sample(logits, position, row.slot, live, slots.sampling).token, None
        q = target_probs(logits, position, row.slot, live, slots.sampling)
        return draw_guess(q, slots.sampling.knobs.seed[row.slot], position), q


def joined(a: KVCache, b: KVCache) -> KVCache:
    return KVCache((*a.k, *b.k), (*a.v, *b.v))

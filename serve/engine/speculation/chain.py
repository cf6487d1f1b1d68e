"""Phases of a model beside which something on the device guesses: a chain of guesses for each row, verified
in one pass."""

from dataclasses import dataclass, replace

from ....kvcache.pages import ON_DEVICE, Batch, KVCache
from ....kvcache.stages import cache_of, joined
from ....model.config import ModelConfig
from ....model.pair import Pair, PairConfig
from ....sampling.accept import RULES
from ...runtime.steps.phases import Result
from ...runtime.steps.step import Slots, awake, judge, step
from .guessers import DraftBatch, DraftProposer


@dataclass(frozen=True)
class ChainSpeculation:
    """Phases of a pair; ON_DEVICE in a batch of `verify` is a token to guess."""

    config: PairConfig
    guesser: DraftProposer
    acceptance: str

    def prefill(self, params: Pair, cache: KVCache, slots: Slots, batch: Batch) -> Result:
        return both(self.config, self.guesser, params, cache, slots, batch)

    def decode(self, params: Pair, cache: KVCache, slots: Slots, batch: Batch) -> Result:
        return both(self.config, self.guesser, params, cache, slots, batch)

    def verify(self, params: Pair, cache: KVCache, slots: Slots, batch: Batch) -> Result:
        target, open, batch = self.config.target, batch.tokens == ON_DEVICE, awake(slots, batch)
        mine, rest = split(self.config, cache)
        rest, tokens, offers = self.guesser.chain(
            params, rest, slots, DraftBatch(of_draft(self.config, batch), open)
        )
        batch, rule = replace(of_target(self.config, batch), tokens=tokens), RULES[self.acceptance]
        mine, slots, out = judge(params.target, mine, slots, batch, offers, config=target, rule=rule)
        return together(mine, rest), slots, out


def both(
    config: PairConfig, guesser: DraftProposer, params: Pair, cache: KVCache, slots: Slots, batch: Batch
) -> Result:
    """One step of the target, and the guesser's own keys for the same tokens."""
    seen, (mine, rest) = awake(slots, batch), split(config, cache)
    own = of_target(config, batch)
    mine, slots, out = step(params.target, mine, slots, own, config=config.target)
    rest = guesser.follow(params, rest, slots, of_draft(config, seen))
    return together(mine, rest), slots, out


# ---------------------------------------------------------------- two models in one cache


def split(config: PairConfig, cache: KVCache) -> tuple[KVCache, KVCache]:
    """The target's layers of a cache, and the draft model's."""
    L = config.target.num_layers
    return cache_of(cache, range(L)), cache_of(cache, range(L, len(cache.k)))


def together(a: KVCache, b: KVCache) -> KVCache:
    return joined([a, b])


def of_target(config: PairConfig, batch: Batch) -> Batch:
    """The batch with the page tables of the target's layers only."""
    return with_tables(config, batch, config.target)


def of_draft(config: PairConfig, batch: Batch) -> Batch:
    """The batch with the page tables of the draft model's layers only, of which a head has none."""
    return batch if config.draft is None else with_tables(config, batch, config.draft)


def with_tables(config: PairConfig, batch: Batch, own: ModelConfig) -> Batch:
    tables = tuple(batch.page_tables[config.windows.index(window)] for window in own.windows)
    return replace(batch, page_tables=tables)

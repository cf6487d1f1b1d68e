"""What each stage of a pipeline computes of a step. Together they are `programs.step`, cut between layers:
the first stage embeds, the last one samples."""

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from ....kvcache.paged import Paged
from ....kvcache.pages import Batch, KVCache, positions
from ....kvcache.stages import config_of
from ....model.config import ModelConfig
from ....model.layers import normalise
from ....model.transformer import Decoder, embed, through
from ....model.tree import pytree
from ....sampling.accept import RULES
from ....sampling.params import NO_TOKEN
from ..steps.places import rows_of_one
from ..steps.step import Output, Slots, StageZeroSlots, awake, judged, lengths, sampled


@pytree
class StageActivations:
    """What a stage hands to the next: hidden states, and what only the first knows of the batch."""

    hidden: Any  # [B,T,D]; of a verification [rows,1,D]
    tokens: Any  # int32 [B,T]
    count: Any  # int32 [B]
    lengths: Any  # int32, of the rows of hidden


@dataclass(frozen=True)
class StageStep:
    """A phase's part for the layers of one stage."""

    config: ModelConfig  # of all stages
    span: range
    phase: str
    acceptance: str = "coupled"

    def enter(
        self, params: Decoder, cache: KVCache, front: StageZeroSlots, batch: Batch
    ) -> tuple[KVCache, StageActivations]:
        """The first stage."""
        return self.go_on(params, cache, self.embedded(params, front, batch), batch)

    def embedded(self, params: Decoder, front: StageZeroSlots, batch: Batch) -> StageActivations:
        """What the first layer is handed."""
        batch = awake(front, batch)
        fed = self.fed(batch)
        x = embed(params, self.config, fed.tokens, positions(fed))
        return StageActivations(x, batch.tokens, batch.count, lengths(front, fed))

    def go_on(
        self, params: Decoder, cache: KVCache, handed: StageActivations, batch: Batch
    ) -> tuple[KVCache, StageActivations]:
        """A stage's layers."""
        fed = self.fed(device_batch(batch, handed))
        attend, config = Paged(fed, self.config.windows), config_of(self.config, self.span)
        x, cache = through(
            params.layers, config, handed.hidden, positions(fed), handed.lengths, attend, cache
        )
        return cache, replace(handed, hidden=x)

    def leave(
        self, params: Decoder, cache: KVCache, slots: Slots, handed: StageActivations, batch: Batch
    ) -> tuple[KVCache, Slots, Output, StageZeroSlots]:
        """The last stage."""
        cache, handed = self.go_on(params, cache, handed, batch)
        return cache, *self.outcome(params, slots, handed, batch)

    def outcome(
        self, params: Decoder, slots: Slots, handed: StageActivations, batch: Batch
    ) -> tuple[Slots, Output, StageZeroSlots]:
        """What comes of what the last layer hands on."""
        batch, hidden = device_batch(batch, handed), normalise(handed.hidden, params.norm, self.config.norm)
        if self.phase == "verify":
            slots, output = judged(params, self.config, slots, batch, hidden, None, RULES[self.acceptance])
        else:
            slots, output = sampled(params, self.config, slots, batch, hidden)
        return slots, output, front_of(slots)

    def fed(self, batch: Batch) -> Batch:
        return rows_of_one(batch) if self.phase == "verify" else batch


def device_batch(batch: Batch, handed: StageActivations) -> Batch:
    """The host's batch, as the device sees it."""
    return replace(batch, tokens=handed.tokens, count=handed.count)


def front_of(slots: Slots) -> StageZeroSlots:
    return StageZeroSlots(slots.last, slots.live, slots.end)


def seat_front(front: StageZeroSlots, slot: Int[Array, ""], end: Int[Array, ""]) -> StageZeroSlots:
    """A slot has another request."""
    return StageZeroSlots(
        front.last.at[slot].set(NO_TOKEN), front.live.at[slot].set(True), front.end.at[slot].set(end)
    )


def with_updates(front: StageZeroSlots, news: StageZeroSlots, whose: Bool[Array, " C"]) -> StageZeroSlots:
    """What the first stage knows once it has heard of some slots."""
    return StageZeroSlots(
        jnp.where(whose, news.last, front.last), jnp.where(whose, news.live, front.live), front.end
    )

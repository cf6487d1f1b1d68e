"""Computation of a stage. The stages of a route together are `steps.step`, cut between layers or inside of
them: the first stage embeds, the last one samples."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ....kvcache.paged import Paged
from ....kvcache.pages import Batch, KVCache, positions
from ....kvcache.stages import config_of
from ....model.config import ModelConfig
from ....model.layers import normalise
from ....model.transformer import Decoder, Layer, after_ffn, attention_half, embed, ffn_half, through, turns
from ....model.tree import pytree
from ....model.weights.adapted import places_in, with_owners
from ....sampling.accept import RULES
from ....sampling.params import NO_TOKEN
from ..steps.places import rows_of_one
from ..steps.step import Output, Slots, StageZeroSlots, awake, judged, lengths, sampled
from .route import ATTENTION, FFN, Stage


@pytree
class StageActivations:
    """Hidden states between stages, and what only the first stage knows of the batch."""

    hidden: Any  # [B,T,D]; of a verification [rows,1,D]
    tokens: Any  # int32 [B,T]
    count: Any  # int32 [B]
    lengths: Any  # int32, of the rows of hidden
    owner: Any = None  # int32, the places of these rows' adapters; None without any


@dataclass(frozen=True)
class StageStep:
    """A stage's part of a phase."""

    config: ModelConfig  # of all stages
    stage: Stage
    phase: str
    acceptance: str = "coupled"

    def run(
        self,
        params: Any,
        cache: KVCache | None,
        slots: Slots | None,
        kept: StageActivations | None,
        given: Any,
        batch: Batch | None,
    ) -> tuple[Any, Any, Output | None, Any]:
        """Compute the stage.

        cache: the pools of its layers.
        slots: given to the last stage.
        kept: what the last stage on this group of devices has kept, of an attention half.
        given: what the stage before hands on; the first stage is given what it knows of the slots.

        Returns the cache, what the group keeps (the last stage the slots), the output of the last stage, and
        what the next stage is given.
        """
        if self.stage.half == FFN:
            return None, None, None, ffn_half(params, self.config.layers[self.stage.layers.start], given)
        assert batch is not None
        handed, inner = self._to_next_stage(params, kept, given, batch), None
        if self.stage.half == ATTENTION and cache is not None:
            cache, handed, inner = self._attend(params.layers[-1], cache, handed, batch)
        elif cache is not None:
            cache, handed = self._through(params.layers, cache, handed, batch)
        if self.stage.last:
            assert slots is not None
            return cache, *self._outcome(params, slots, handed, batch)
        return (cache, None, None, handed) if inner is None else (cache, handed, None, inner)

    def _to_next_stage(
        self, params: Decoder, kept: StageActivations | None, given: Any, batch: Batch
    ) -> StageActivations:
        """Return the activations before the stage's first layer."""
        if self.stage.first:
            batch = awake(given, batch)
            fed = self._fed(batch)
            x = embed(params, self.config, fed.tokens, positions(fed))
            owner = given.adapter[fed.slot] if places_in(params) else None
            return StageActivations(x, batch.tokens, batch.count, lengths(given, fed), owner)
        if kept is None:
            return given
        return replace(kept, hidden=after_ffn(params.layers[0], self.config, kept.hidden, given))

    def _through(
        self, layers: Sequence[Layer], cache: KVCache, handed: StageActivations, batch: Batch
    ) -> tuple[KVCache, StageActivations]:
        """Whole layers."""
        fed, config = self._fed(device_batch(batch, handed)), config_of(self.config, self.stage.layers)
        attend, layers = Paged(fed, self.config.windows), with_owners(layers, handed.owner)
        x, cache = through(layers, config, handed.hidden, positions(fed), handed.lengths, attend, cache)
        return cache, replace(handed, hidden=x)

    def _attend(
        self, layer: Layer, cache: KVCache, handed: StageActivations, batch: Batch
    ) -> tuple[KVCache, StageActivations, Float[Array, "B T D"]]:
        """A layer up to its feed-forward layer, and what that is given."""
        fed, config = self._fed(device_batch(batch, handed)), config_of(self.config, self.stage.layers)
        (turn,) = turns(config, positions(fed), handed.lengths)
        attend, kind = Paged(fed, self.config.windows), config.layers[0]
        x, inner, cache = attention_half(layer, kind, config, handed.hidden, turn, attend, cache, 0)
        return cache, replace(handed, hidden=x), inner

    def _outcome(
        self, params: Decoder, slots: Slots, handed: StageActivations, batch: Batch
    ) -> tuple[Slots, Output, StageZeroSlots]:
        """Sample from the hidden states behind the last layer."""
        batch, hidden = device_batch(batch, handed), normalise(handed.hidden, params.norm, self.config.norm)
        if self.phase == "verify":
            slots, output = judged(params, self.config, slots, batch, hidden, None, RULES[self.acceptance])
        else:
            slots, output = sampled(params, self.config, slots, batch, hidden)
        return slots, output, front_of(slots)

    def _fed(self, batch: Batch) -> Batch:
        return rows_of_one(batch) if self.phase == "verify" else batch


def device_batch(batch: Batch, handed: StageActivations) -> Batch:
    """The host's batch, as the device sees it."""
    return replace(batch, tokens=handed.tokens, count=handed.count)


def front_of(slots: Slots) -> StageZeroSlots:
    return StageZeroSlots(slots.last, slots.live, slots.end, slots.adapter)


def seat_front(
    front: StageZeroSlots, slot: Int[Array, ""], end: Int[Array, ""], adapter: Int[Array, ""]
) -> StageZeroSlots:
    """A slot has another request."""
    return StageZeroSlots(
        last=front.last.at[slot].set(NO_TOKEN),
        live=front.live.at[slot].set(True),
        end=front.end.at[slot].set(end),
        adapter=front.adapter.at[slot].set(adapter),
    )


def with_updates(front: StageZeroSlots, news: StageZeroSlots, whose: Bool[Array, " C"]) -> StageZeroSlots:
    """Merge the state of the slots in `whose` into what the first stage knows."""
    last, live = jnp.where(whose, news.last, front.last), jnp.where(whose, news.live, front.live)
    return replace(front, last=last, live=live)

"""The programs of a model whose feed-forward layers lie apart, before they are compiled: one for each half of
a layer. Layers that are alike share theirs, since weights and keys are arguments."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
from jax.sharding import Sharding

from ....kvcache.pages import Batch, KVCache
from ....kvcache.placement import whole
from ....kvcache.stages import around, attention_of, cache_of
from ....model.pair import target_of
from ....model.transformer import Decoder, Layer
from ..compiled.compile import StepArguments, batch_like
from ..compiled.shapes import Shape, Sizes
from ..steps.phases import TargetOnly
from .halves import Halves, behind
from .lowering import at, front_at
from .relay import SlotUpdateReceiver, StageThreads
from .ring import ATTENTION, FFN, Ring
from .steps import StageActivations, StageStep


@dataclass(frozen=True)
class Apart:
    """What the halves' programs follow from: phases, an engine's arguments as shapes, and its sizes."""

    phases: TargetOnly
    like: StepArguments
    sizes: Sizes

    @property
    def caches(self) -> list[KVCache]:
        return [cache_of(self.like.cache, range(i, i + 1)) for i in range(len(self._params.layers))]

    def place(self, stage: int) -> Sharding:
        """Where a half has what is on each of its devices."""
        layer = self._params.layers[0]
        own = layer.any_norm.gain if stage == ATTENTION else jax.tree.leaves(layer.ffn)[0]
        return whole(own.sharding)

    def lower(self, shape: Shape) -> list[jax.stages.Lowered]:
        """What embeds, what samples, and a program for each kind of half."""
        here, there, config = self.place(ATTENTION), self.place(FFN), self.phases.target
        halves = Halves(StageStep(config, range(config.num_layers), shape.phase, self.phases.acceptance))
        ends, batch = around(self._params), batch_like(shape, self.sizes, here)
        enter = jax.jit(halves.whole.embedded, out_shardings=here)
        entered = enter.trace(ends, front_at(self.like, here), batch)
        handed = at(entered.out_info, here)
        leave = jax.jit(halves.leave, donate_argnums=2, out_shardings=here)
        left = leave.trace(
            ends, behind(self._params.layers[-1]), self.like.slots, handed, handed.hidden, batch
        )
        attended = [self._attend(halves, i, handed, batch) for i in sorted({*self.attends})]
        fed = [self._feed(halves, i, at(handed.hidden, there)) for i in sorted({*self.feeds})]
        return [traced.lower() for traced in (entered, left, *attended, *fed)]

    def _attend(self, halves: Halves, i: int, handed: StageActivations, batch: Batch) -> Any:
        here, pools = self.place(ATTENTION), jax.tree.map(lambda pool: pool.sharding, self.caches[i])
        attend = jax.jit(partial(halves.attend, i), donate_argnums=2, out_shardings=(pools, here, here))
        return attend.trace(*self._attended(i), handed, handed.hidden if i else None, batch)

    def _feed(self, halves: Halves, i: int, inner: Any) -> Any:
        feed = jax.jit(partial(halves.feed, i), out_shardings=self.place(FFN))
        return feed.trace(self._params.layers[i].ffn, inner)

    def joined(self, stages: StageThreads, ear: SlotUpdateReceiver, programs: Sequence[Any]) -> Ring:
        enter, leave, *halves = programs
        attends = dict(zip(sorted({*self.attends}), halves, strict=False))
        feeds = dict(zip(sorted({*self.feeds}), halves[len(attends) :], strict=True))
        return Ring(
            stages=stages,
            enter=enter,
            attends=tuple(attends[i] for i in self.attends),
            feeds=tuple(feeds[i] for i in self.feeds),
            leave=leave,
            here=self.place(ATTENTION),
            there=self.place(FFN),
            ear=ear,
        )

    @cached_property
    def attends(self) -> list[int]:
        """Of each layer the first that has its attention half's program."""
        return firsts(self.phases.target.layers, map(self._attended, range(len(self._params.layers))))

    @cached_property
    def feeds(self) -> list[int]:
        """The same of feed-forward layers."""
        kinds = [kind.ffn for kind in self.phases.target.layers]
        return firsts(kinds, (layer.ffn for layer in self._params.layers))

    @property
    def _params(self) -> Decoder:
        return target_of(self.like.params)

    def _attended(self, i: int) -> tuple[Layer, Layer | None, KVCache]:
        """What an attention half takes beside what comes from other programs."""
        layers = self._params.layers
        return attention_of(layers[i]), behind(layers[i - 1]) if i else None, self.caches[i]


def firsts(kinds: Sequence[Any], given: Iterable[Any]) -> list[int]:
    """Of each layer the first of the same kind whose program is given arrays of the same shapes."""
    keys = [(kind, *jax.tree.flatten(own)) for kind, own in zip(kinds, given, strict=True)]
    return [keys.index(key) for key in keys]

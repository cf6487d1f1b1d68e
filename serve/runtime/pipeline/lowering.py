"""The programs of a route's stages, each for its own devices, before they are compiled."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Sharding

from ....kvcache.pages import KVCache
from ....kvcache.placement import whole
from ....kvcache.stages import cache_of
from ....model.pair import target_of
from ..compiled.compile import StepArguments, batch_like
from ..compiled.shapes import Shape, Sizes
from ..steps.phases import TargetOnly
from ..steps.step import StageZeroSlots
from .relay import PipelinedStep, SlotUpdateReceiver, StageThreads
from .route import FFN, Stage
from .steps import StageStep, front_of


@dataclass(frozen=True)
class StageLowering:
    """Lowers the stages of a route.

    like: an engine's arguments as shapes, with their places.
    """

    phases: TargetOnly
    like: StepArguments
    sizes: Sizes
    route: Sequence[Stage]

    def place(self, stage: Stage) -> Sharding:
        """The sharding of what a stage has on each of its devices."""
        layers = target_of(self.like.params).layers
        layer = layers[min(stage.layers.start, len(layers) - 1)]
        own = jax.tree.leaves(layer.ffn)[0] if stage.half == FFN else layer.any_norm.gain
        return whole(own.sharding)

    @property
    def front(self) -> StageZeroSlots:
        """Shapes of what the first stage knows of the slots."""
        return at(front_of(self.like.slots), self.place(self.route[0]))

    @property
    def caches(self) -> list[KVCache]:
        """Shapes of the cache's parts: one for each stage with pools."""
        return [cache_of(self.like.cache, stage.pools) for stage in self.route if stage.pools]

    @cached_property
    def firsts(self) -> list[int]:
        """For each stage the index of the first with the same program: halves of layers that are alike share
        theirs, since weights and keys are arguments."""
        keys = [
            (stage.group, *self._kind(stage), *jax.tree.flatten(self._own(stage))) for stage in self.route
        ]
        return [keys.index(key) for key in keys]

    def _kind(self, stage: Stage) -> tuple[Any, ...]:
        kinds = [self.phases.target.layers[i] for i in stage.layers]
        return stage.first, stage.last, *((kind.ffn for kind in kinds) if stage.half == FFN else kinds)

    def _own(self, stage: Stage) -> tuple[Any, KVCache | None]:
        cache = cache_of(self.like.cache, stage.pools) if stage.pools else None
        return stage.params(target_of(self.like.params)), cache

    def lower(self, shape: Shape) -> list[jax.stages.Lowered]:
        """A program for each stage that is the first of its kind."""
        traced: dict[int, Any] = {}
        kept: dict[int, Any] = {}  # by groups
        handed: Any = self.front
        following = [*self.route[1:], self.route[0]]
        for stage, then, i in zip(self.route, following, self.firsts, strict=True):
            if i not in traced:
                traced[i] = self._trace(shape, stage, kept.get(stage.group), handed)
            _, own, _, out = traced[i].out_info
            kept[stage.group], handed = at(own, self.place(stage)), at(out, self.place(then))
        return [program.lower() for program in traced.values()]

    def _trace(self, shape: Shape, stage: Stage, kept: Any, handed: Any) -> Any:
        here, (params, cache) = self.place(stage), self._own(stage)
        pools = jax.tree.map(lambda pool: pool.sharding, cache)
        step = StageStep(self.phases.target, stage, shape.phase, self.phases.acceptance)
        jitted = jax.jit(step.run, donate_argnums=(1, 2), out_shardings=(pools, here, here, here))
        slots = self.like.slots if stage.last else None
        batch = None if stage.half == FFN else batch_like(shape, self.sizes, here)
        return jitted.trace(params, cache, slots, kept, handed, batch)

    def joined(self, threads: StageThreads, ear: SlotUpdateReceiver, *programs: Any) -> PipelinedStep:
        """A shape's compiled programs, in the order of `lower`, called as the program of one device is."""
        each = dict(zip(dict.fromkeys(self.firsts), programs, strict=True))
        places = tuple(map(self.place, self.route))
        return PipelinedStep(threads, tuple(self.route), tuple(each[i] for i in self.firsts), places, ear)


def at(tree: Any, where: Sharding) -> Any:
    """Shapes at another place."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)

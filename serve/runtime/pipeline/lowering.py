"""The programs of a pipeline's stages, each for its own devices, before they are compiled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import Sharding

from ....kvcache.pages import KVCache
from ....kvcache.placement import whole
from ....kvcache.stages import cache_of, params_of
from ....model.pair import target_of
from ..compiled.compile import StepArguments, batch_like
from ..compiled.shapes import Shape, Sizes
from ..steps.phases import TargetOnly
from ..steps.step import StageZeroSlots
from .relay import PipelinedStep, SlotUpdateReceiver, StageThreads
from .steps import StageStep, front_of


class StageRoute(Protocol):
    """A step's way over groups of devices: through stages of consecutive layers, or to and fro between the
    halves of each layer."""

    @property
    def caches(self) -> Sequence[KVCache]:
        """Shapes of the cache's parts."""
        ...

    def place(self, stage: int) -> Sharding: ...

    def lower(self, shape: Shape) -> list[jax.stages.Lowered]: ...

    def joined(
        self, stages: StageThreads, ear: SlotUpdateReceiver, programs: Sequence[Any]
    ) -> Callable[..., Any]:
        """A shape's compiled programs, in the order of `lower`, called as one device's is."""
        ...


@dataclass(frozen=True)
class StageLowering:
    """What the stages' programs follow from: phases, an engine's arguments as shapes, its sizes, and the
    layers of each stage."""

    phases: TargetOnly
    like: StepArguments
    sizes: Sizes
    spans: Sequence[range]

    def place(self, stage: int) -> Sharding:
        """Where a stage has what is on each of its devices."""
        layer = target_of(self.like.params).layers[self.spans[stage].start]
        return whole(layer.any_norm.gain.sharding)

    @property
    def caches(self) -> list[KVCache]:
        return [cache_of(self.like.cache, span) for span in self.spans]

    def joined(self, stages: StageThreads, ear: SlotUpdateReceiver, programs: Sequence[Any]) -> PipelinedStep:
        hand = tuple(self.place(stage) for stage in range(1, len(self.spans)))
        return PipelinedStep(stages, tuple(programs), hand, self.place(0), ear)

    def lower(self, shape: Shape) -> list[jax.stages.Lowered]:
        """A program for each stage."""
        lowered, handed = [], None
        for stage in range(len(self.spans)):
            traced = self._trace(shape, stage, handed)
            lowered.append(traced.lower())
            handed = traced.out_info[1]
        return lowered

    def _trace(self, shape: Shape, stage: int, handed: Any) -> Any:
        span, here = self.spans[stage], self.place(stage)
        cut = StageStep(self.phases.target, span, shape.phase, self.phases.acceptance)
        cache, params = cache_of(self.like.cache, span), params_of(target_of(self.like.params), span)
        pools = jax.tree.map(lambda pool: pool.sharding, cache)
        batch = batch_like(shape, self.sizes, here)
        if stage == 0:
            jitted = jax.jit(cut.enter, donate_argnums=1, out_shardings=(pools, here))
            return jitted.trace(params, cache, front_at(self.like, here), batch)
        if stage < len(self.spans) - 1:
            jitted = jax.jit(cut.go_on, donate_argnums=1, out_shardings=(pools, here))
            return jitted.trace(params, cache, at(handed, here), batch)
        jitted = jax.jit(cut.leave, donate_argnums=(1, 2), out_shardings=(pools, here, here, here))
        return jitted.trace(params, cache, self.like.slots, at(handed, here), batch)


def front_at(like: StepArguments, where: Sharding) -> StageZeroSlots:
    """The shapes of what the first stage knows of the slots."""
    return at(front_of(like.slots), where)


def at(tree: Any, where: Sharding) -> Any:
    """Shapes at another place."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), tree)

"""Lowering of the programs of a route's stages, each for its own devices."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Sharding

from ....kvcache.pages import KVCache
from ....kvcache.shardings import replicated_sharding
from ....kvcache.stages import stage_cache
from ....model.draft_pair import target_params
from ..compiled.lowering import StepArguments, abstract_batch
from ..compiled.shapes import Shape, Sizes
from ..steps.phases import TargetOnly
from ..steps.step import FirstStageSlots
from .pipelined_step import PipelinedStep, SlotUpdateReceiver, StageThreads
from .route import FFN_HALF, Stage
from .steps import StageStep, select_first_stage_slots


@dataclass(frozen=True)
class StageLowering:
    """Lowering of the stages of a route.

    phases: the model's phases.
    abstract_arguments: a step's arguments as shapes, with their placement.
    sizes: sizes of the engine.
    route: stages of a step, in order.
    """

    phases: TargetOnly
    abstract_arguments: StepArguments
    sizes: Sizes
    route: Sequence[Stage]

    def stage_sharding(self, stage: Stage) -> Sharding:
        """Return the sharding of arrays that are replicated on a stage's devices."""
        layers = target_params(self.abstract_arguments.params).layers
        layer = layers[min(stage.layers.start, len(layers) - 1)]
        leaf = jax.tree.leaves(layer.ffn)[0] if stage.half == FFN_HALF else layer.any_mixer_leaf
        return replicated_sharding(leaf.sharding)

    @property
    def abstract_first_stage_slots(self) -> FirstStageSlots:
        """Slots of the first stage, as shapes."""
        return abstract_with_sharding(
            select_first_stage_slots(self.abstract_arguments.slots), self.stage_sharding(self.route[0])
        )

    @property
    def abstract_cache_parts(self) -> list[KVCache]:
        """Parts of the cache as shapes, one for each stage with pools."""
        return [
            stage_cache(self.abstract_arguments.cache, stage.pool_layers)
            for stage in self.route
            if stage.pool_layers
        ]

    @cached_property
    def program_indices(self) -> list[int]:
        """Index of the first stage with the same program, for each stage. Equal layers' halves share a
        program, because weights and keys are its arguments."""
        keys = [
            (
                stage.group,
                *self._program_facts(stage),
                *jax.tree.flatten(self._abstract_params_and_cache(stage)),
            )
            for stage in self.route
        ]
        return [keys.index(key) for key in keys]

    def _program_facts(self, stage: Stage) -> tuple[Any, ...]:
        """Return the facts of a stage that its program depends on, besides shapes."""
        kinds = [self.phases.target_config.layers[i] for i in stage.layers]
        return (
            stage.is_first,
            stage.is_last,
            *((kind.ffn for kind in kinds) if stage.half == FFN_HALF else kinds),
        )

    def _abstract_params_and_cache(self, stage: Stage) -> tuple[Any, KVCache | None]:
        """Return a stage's parameters and its part of the cache, as shapes."""
        cache = stage_cache(self.abstract_arguments.cache, stage.pool_layers) if stage.pool_layers else None
        return stage.select_params(target_params(self.abstract_arguments.params)), cache

    def lower(self, shape: Shape) -> list[jax.stages.Lowered]:
        """Lower the programs of a step: one for each stage that is the first with its program, in order."""
        traced: dict[int, Any] = {}
        kept_by_group: dict[int, Any] = {}  # by device group, what the group keeps for its next stage
        activations: Any = self.abstract_first_stage_slots
        following = [*self.route[1:], self.route[0]]
        for stage, next_stage, i in zip(self.route, following, self.program_indices, strict=True):
            if i not in traced:
                traced[i] = self._trace(shape, stage, kept_by_group.get(stage.group), activations)
            _, group_state, _, out = traced[i].out_info
            kept_by_group[stage.group] = abstract_with_sharding(group_state, self.stage_sharding(stage))
            activations = abstract_with_sharding(out, self.stage_sharding(next_stage))
        return [program.lower() for program in traced.values()]

    def _trace(self, shape: Shape, stage: Stage, kept_activations: Any, activations: Any) -> Any:
        """Trace a stage's program. Pools and slots are donated."""
        sharding, (params, cache) = self.stage_sharding(stage), self._abstract_params_and_cache(stage)
        pools = jax.tree.map(lambda pool: pool.sharding, cache)
        step = StageStep(self.phases.target_config, stage, shape.phase, self.phases.acceptance)
        jitted = jax.jit(step.run, donate_argnums=(1, 2), out_shardings=(pools, sharding, sharding, sharding))
        slots = self.abstract_arguments.slots if stage.is_last else None
        batch = None if stage.half == FFN_HALF else abstract_batch(shape, self.sizes, sharding)
        return jitted.trace(params, cache, slots, kept_activations, activations, batch)

    def make_pipelined_step(
        self, threads: StageThreads, receiver: SlotUpdateReceiver, *programs: Any
    ) -> PipelinedStep:
        """Join a shape's compiled programs, in the order of `lower`, to a step that is called like the
        program of one device."""
        program_by_index = dict(zip(dict.fromkeys(self.program_indices), programs, strict=True))
        shardings = tuple(map(self.stage_sharding, self.route))
        return PipelinedStep(
            threads,
            tuple(self.route),
            tuple(program_by_index[i] for i in self.program_indices),
            shardings,
            receiver,
        )


def abstract_with_sharding(tree: Any, sharding: Sharding) -> Any:
    """Return a tree of arrays or shapes as shapes with another sharding."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

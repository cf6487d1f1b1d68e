"""Lowering of the programs of a model that is split into stages or halves of layers. They are called like the
programs of one device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from ....kvcache.pages import KVCache
from ....model.draft_pair import EngineParams
from ..compiled.executable_cache import JoinedPrograms, Lowered
from ..compiled.lowering import (
    LocalLowering,
    ProgramKey,
    StepArguments,
    is_shape,
    lower_zeros,
    make_abstract_arguments,
    xla_options,
)
from ..compiled.shapes import Shape, Sizes
from ..compiled.small_programs import SmallPrograms
from ..steps.phases import Phases, TargetOnly
from ..steps.step import FirstStageSlots, SlotContents, Slots
from .pipelined_step import SlotUpdateReceiver, StagedCache, StagedSlots, StageThreads
from .route import Stage, make_route
from .stage_lowering import StageLowering
from .steps import assign_first_stage_slot, merge_slot_update


@dataclass(frozen=True)
class PipelineLowering:
    """Lowering of programs for parameters in pipeline stages, or with feed-forward layers on separate devices
    (`kvcache.stages`). It implements `ProgramLowering`; cache, slots and outputs are futures.

    route: stages of a step, in order.
    stages: threads that dispatch the stages' programs.
    """

    phases: TargetOnly
    abstract_arguments: StepArguments
    sizes: Sizes
    route: Sequence[Stage]
    stages: StageThreads

    @classmethod
    def from_params(cls, phases: Phases, params: EngineParams, sizes: Sizes) -> "PipelineLowering":
        """Return the lowering for the placement of the parameters, with threads for their devices."""
        assert isinstance(phases, TargetOnly), "models and heads draft on one device"
        abstract_arguments, route = make_abstract_arguments(phases.config, params, sizes), make_route(params)
        names = list(dict.fromkeys(stage.name for stage in route))
        return cls(phases, abstract_arguments, sizes, route, StageThreads(names, route[-1].group))

    @cached_property
    def stage_lowering(self) -> StageLowering:
        """Lowering of the stages' programs."""
        return StageLowering(self.phases, self.abstract_arguments, self.sizes, self.route)

    # ------------------------------------------------------------ a step

    def choose_sampler(self, shape: Shape) -> None:
        """Return None: the last stage samples in its program."""

    def describe(self, program: ProgramKey) -> tuple[str, tuple[Any, ...]]:
        """Return what a program computes, and its arguments as shapes."""
        name, operands = self._local.describe(program)
        return program.phase if is_shape(program) else name, operands

    def lower(self, program: ProgramKey) -> Lowered:
        """Lower a step, a program for each stage, or a program for the last stage's hidden states."""
        if not is_shape(program):
            return self._local.lower(program)
        return JoinedPrograms(self.stage_lowering.lower(program), self.join_parts)

    def join_parts(self, *programs: Any) -> Any:
        """Join the stages' programs to a step, which are several; a program alone is no step."""
        if len(programs) == 1:
            return programs[0]
        return self.stage_lowering.make_pipelined_step(self.stages, self._slot_update_receiver, *programs)

    # ------------------------------------------------------------ slots and cache

    def lower_small(self) -> SmallPrograms:
        """Lower the small programs for the slots of the first and the last stage, and each stage's cache."""
        return SmallPrograms(
            self._lower_slot_assignment(),
            JoinedPrograms([self._local.lower_history_load()], self._wrap_slot_loader),
            JoinedPrograms([self._local.lower_mask_load()], self._wrap_slot_loader),
            self._lower_cache(),
            self._lower_slots(),
        )

    @cached_property
    def _local(self) -> LocalLowering:
        """Lowering of the programs of the last stage's slots."""
        return LocalLowering(self.phases, self.abstract_arguments, self.sizes)

    @property
    def _first_stage_sharding(self) -> Sharding:
        """Sharding of arrays that are replicated on the first stage's devices."""
        return self.stage_lowering.stage_sharding(self.route[0])

    @cached_property
    def _slot_update_receiver(self) -> SlotUpdateReceiver:
        """Receiver that merges the last stage's updates into the first stage's slots."""
        first_stage_slots = self.stage_lowering.abstract_first_stage_slots
        mask = jax.ShapeDtypeStruct(first_stage_slots.live.shape, bool)
        lowered_merge: Any = jax.jit(merge_slot_update, out_shardings=self._first_stage_sharding).lower(
            first_stage_slots, first_stage_slots, mask
        )
        options = xla_options(self.abstract_arguments)
        return SlotUpdateReceiver(self.stages, lowered_merge.compile(compiler_options=options))

    def _lower_slot_assignment(self) -> JoinedPrograms:
        scalar, sharding = jax.ShapeDtypeStruct((), jnp.int32), self._first_stage_sharding
        lowered_assignment = jax.jit(assign_first_stage_slot, out_shardings=sharding).lower(
            self.stage_lowering.abstract_first_stage_slots, scalar, scalar, scalar
        )
        return JoinedPrograms(
            [self._local.lower_slot_assignment(), lowered_assignment], self._join_slot_assignment
        )

    def _join_slot_assignment(self, assign_last_stage: Any, assign_first_stage: Any) -> Any:
        """Join the programs that assign a slot in the last stage (`assign_last_stage`) and in the first
        (`assign_first_stage`)."""

        def assign_slot(slots: StagedSlots, slot: Any, contents: SlotContents) -> StagedSlots:
            submit = self.stages.submit
            return StagedSlots(
                last_stage_slots=submit(
                    self.stages.last_group, assign_last_stage, slots.last_stage_slots, slot, contents
                ),
                first_stage_slots=submit(
                    0, assign_first_stage, slots.first_stage_slots, slot, contents.end, contents.adapter
                ),
                updates=slots.updates_without_slot(int(slot)),
            )

        return assign_slot

    def _wrap_slot_loader(self, compiled: Any) -> Any:
        """Wrap a program that changes the last stage's slots to take and return all slots."""

        def load_into_last_stage(slots: StagedSlots, *inputs: Any) -> StagedSlots:
            submit, exit_group = self.stages.submit, self.stages.last_group
            return replace(
                slots, last_stage_slots=submit(exit_group, compiled, slots.last_stage_slots, *inputs)
            )

        return load_into_last_stage

    def _lower_slots(self) -> JoinedPrograms:
        def join_slots(
            fresh_last_stage: Callable[[], Slots], fresh_first_stage: Callable[[], FirstStageSlots]
        ) -> Callable[[], StagedSlots]:
            return lambda: StagedSlots(fresh_last_stage(), fresh_first_stage())

        lowered_first_stage = lower_zeros(self.stage_lowering.abstract_first_stage_slots)
        return JoinedPrograms([self._local.lower_slots(), lowered_first_stage], join_slots)

    def _lower_cache(self) -> JoinedPrograms:
        def join_caches(*fresh: Callable[[], KVCache]) -> Callable[[], StagedCache]:
            return lambda: StagedCache(tuple(make() for make in fresh))

        return JoinedPrograms(
            [lower_zeros(cache) for cache in self.stage_lowering.abstract_cache_parts], join_caches
        )
